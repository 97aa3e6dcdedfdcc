"""Counts bytes: of living tensors, and of what autograd holds for a backward pass."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the living storages that operations inside the context made; `peak` is their most at one time."""

    def __init__(self):
        super().__init__()
        self.living: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.living:
                    self.living[key] = storage.nbytes()
                    weakref.finalize(storage, self.living.pop, key, None)
        self.peak = max(self.peak, sum(self.living.values()))
        return result


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
