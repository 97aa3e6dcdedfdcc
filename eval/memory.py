"""Counts the bytes that autograd holds for a backward pass, while a training step runs."""

import torch


class SavedActivations:
    """Bytes that autograd holds for a backward pass, parameters left out; `held` now, `peak` at the most."""

    def __init__(self, parameters):
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.held, self.peak = 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor)

    def _pack(self, tensor):
        return _Packed(self, tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


class _Packed:
    def __init__(self, counter, tensor):
        self.tensor, self.counter = tensor.detach(), counter  # an output that is its own graph would never be freed
        own = tensor.untyped_storage().data_ptr() not in counter.known
        self.size = tensor.numel() * tensor.element_size() if own else 0
        counter.held += self.size
        counter.peak = max(counter.peak, counter.held)

    def __del__(self):
        self.counter.held -= self.size
