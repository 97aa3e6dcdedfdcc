"""A tokenizer with one token per character, chat templates of three families, and a Llama of that vocabulary."""

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Only the last answer is kept whole: earlier renderings are no prefix of later ones; {% generation %} marks answers.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:{% generation %}"
    "{{ message['content'] if loop.last else message['content'][:1] }}</s>{% endgeneration %}"
    "{% else %}Q:{{ message['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def tokenizer_with(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per character and per special token; plain calls add <s>, as Llama's and Gemma's tokenizers do."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *map(chr, range(10, 127))])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=SPECIAL[3:]
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_llama(attention: str = "sdpa", blocks: int = 2) -> LlamaForCausalLM:
    """A random Llama with seed 0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
