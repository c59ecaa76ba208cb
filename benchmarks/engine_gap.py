"""Parts of vLLM that make its log-probs differ from the trainer's in bfloat16.

    .venv-vllm/bin/python -m benchmarks.engine_gap [--model DIR] [--prompts N] [--tokens N]
    [--quick] [--json FILE]

Each row reads the same tokens with the same weights: transformers in float64 (the truth), the
trainer, transformers in bfloat16, and vLLM with more and more of its parts replaced by those of the
trainer. A figure is the mean difference of the tokens' log-probs, in nats. Matrix products of
bfloat16 add up in float64 in all rows, so that their order, which depends on shapes and on the
processor, changes no rounding. DIR is a llama of transformers; without it a small random one, whose
logits have the size of a trained model's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.numerics import Answer, gaps, prompts_of
from benchmarks.support.report import arguments, keep

NARROW = torch.bfloat16
QUICK_PROMPTS, QUICK_TOKENS = 1, 16
_LARGE_LOGIT = 22.0
"""Mean logit of a sampled token, as SmolLM2's."""
_SMALL = LlamaConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=3,
    num_key_value_heads=3,
    max_position_embeddings=1024,
    initializer_range=0.06,
    tie_word_embeddings=False,
    eos_token_id=None,
    bos_token_id=None,
)
_PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Log-probs of all tokens by one program."""

    name: str
    logprobs_T: Tensor


def main() -> None:
    """Prints the table."""
    parser = arguments(__doc__ or "", quick=f"{QUICK_PROMPTS} prompt, {QUICK_TOKENS} tokens")
    parser.add_argument("--model", type=Path, help="directory of a llama; default: a random one")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="sampled tokens of each prompt")
    options = parser.parse_args()
    disable_progress_bar()
    prompts = QUICK_PROMPTS if options.quick else options.prompts
    tokens = QUICK_TOKENS if options.quick else options.tokens
    with TemporaryDirectory() as folder:
        path = options.model or _random_model(Path(folder) / "model")
        texts = _sampled(path, prompts=prompts, tokens=tokens, has_text=options.model is not None)
        rows = [*_rows_of_transformers(path, texts), *_rows_of_vllm(path, texts)]
    _report(rows, options.json)


def _random_model(path: Path) -> Path:
    """A model whose sampled tokens have large logits."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(_SMALL).eval()
    with torch.no_grad():
        ids = torch.randint(_SMALL.vocab_size, (1, _PROMPT_TOKENS))
        logits = model(ids).logits[0]
        model.lm_head.weight *= _LARGE_LOGIT / logits.amax(-1).mean()
    model.to(NARROW).save_pretrained(path)
    return path


@torch.no_grad()
def _sampled(path: Path, *, prompts: int, tokens: int, has_text: bool) -> list[Answer]:
    """Prompts, and tokens sampled after them by transformers in float32."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if has_text:
        begun = prompts_of(path, prompts)
    else:
        drawn = torch.randint(model.config.vocab_size, (prompts, _PROMPT_TOKENS))
        begun = [tuple(ids) for ids in drawn.tolist()]
    found = []
    for prompt in begun:
        ids = list(prompt)
        for _ in range(tokens):
            logits_V = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(torch.multinomial(logits_V.softmax(-1), 1)))
        found.append(Answer(prompt=prompt, tokens=tuple(ids[len(prompt) :]), logprobs=()))
    return found


def _rows_of_transformers(path: Path, texts: Sequence[Answer]) -> Iterator[Row]:
    """Of transformers and of the trainer; the first one is the truth."""
    for name, dtype in (("truth", torch.float64), ("transformers in bfloat16", NARROW)):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        if dtype == NARROW:
            _add_up_in_float64(model)
        yield Row(name=name, logprobs_T=_by_transformers(model, texts))
    for name, dtype in (("trainer, autocast", NARROW), ("trainer in float32", torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if dtype == NARROW:
            _add_up_in_float64(model)
        yield Row(name=name, logprobs_T=_by_trainer(model, texts, dtype))


def _add_up_in_float64(model: Any) -> None:
    """Have the products of a model round operands and results to bfloat16, and nothing else; not
    those of its head, whose type the caller chooses."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            vars(module)["forward"] = partial(_product, module)


def _product(layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        wide: Tensor = x.to(NARROW).double() @ layer.weight.to(NARROW).double().T
        return wide.to(NARROW)


@torch.no_grad()
def _by_transformers(model: nn.Module, texts: Sequence[Answer]) -> Tensor:
    found = []
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.tokens]])
        logits = model(ids).logits[0, len(text.prompt) - 1 : -1]
        kind = torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits.to(kind).log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(text.tokens)[:, None])[:, 0])
    return torch.cat(found).double()


def _by_trainer(model: nn.Module, texts: Sequence[Answer], dtype: torch.dtype) -> Tensor:
    """The difference of zero and the trainer's log-prob, from `numerics`, text by text: a step
    orders its trees by itself."""
    parts = []
    for text in texts:
        zero = Answer(prompt=text.prompt, tokens=text.tokens, logprobs=(0.0,) * len(text.tokens))
        found_T = -gaps(model, [zero], dtype)
        parts.append(found_T[-len(text.tokens) :])
    return torch.cat(parts).double()


def _rows_of_vllm(path: Path, texts: Sequence[Answer]) -> Iterator[Row]:
    """vLLM as it is, and with one more part replaced in each row."""
    os.environ |= {
        # The parts are replaced in this process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    from vllm import LLM, SamplingParams

    _keep_matrices()
    llm = LLM(
        str(path),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 28,
    )
    (model,) = llm.apply_model(lambda one: one)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def read() -> Tensor:
        found = []
        for text in texts:
            ids = [*text.prompt, *text.tokens]
            (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            entries = output.prompt_logprobs[len(text.prompt) :]
            found += [e[t].logprob for e, t in zip(entries, text.tokens, strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    for name, replace_part in _PARTS:
        replace_part(model)
        yield Row(name=name, logprobs_T=read())


def _keep_matrices() -> None:
    """Where the processor has bfloat16, vLLM packs matrices and frees the plain ones."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def packed_beside(layer: nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = packed_beside


def _products(model: Any) -> None:
    """The same products as in the other rows; not yet a part of the trainer."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for one in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            weight = one.weight.detach().clone()
            one.forward = partial(_vllm_product, weight)


def _vllm_product(weight: Tensor, x: Tensor) -> tuple[Tensor, None]:
    return (x.to(NARROW).double() @ weight.double().T).to(NARROW), None


def _wide_head(model: Any) -> None:
    weight = model.lm_head.weight.detach().clone()
    vocabulary = model.config.vocab_size
    model.compute_logits = lambda states: states.float() @ weight[:vocabulary].float().T


def _wide_norms(model: Any) -> None:
    """Residual stream and norms; the results are rounded."""
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = partial(_norm, norm, NARROW)
    model.model.norm.forward = partial(_norm, model.model.norm, NARROW)


def _wide_last_norm(model: Any) -> None:
    model.model.norm.forward = partial(_norm, model.model.norm, torch.float32)


def _norm(norm: Any, kind: torch.dtype, x: Tensor, residual: Tensor | None = None) -> Any:
    stream = x.float() if residual is None else residual.float() + x.float()
    scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    normed = (norm.weight.float() * (stream * scale)).to(kind)
    return normed if residual is None else (normed, stream)


def _wide_rotary(model: Any) -> None:
    """The results are rounded, as the trainer does it."""
    for layer in model.model.layers:
        layer.self_attn.rotary_emb.forward = partial(_rotate, model.config)


def _rotate(config: Any, positions_T: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base = config.rope_parameters["rope_theta"]
    powers = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    angles_TD = positions_T.float()[:, None] * (1.0 / base**powers)
    cos, sin = (torch.cat([f(angles_TD)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

    def rotated(x: Tensor) -> Tensor:
        heads = x.view(len(x), -1, size)
        first, second = heads.float().chunk(2, -1)
        turned = heads.float() * cos + torch.cat([-second, first], -1) * sin
        return turned.to(NARROW).flatten(1)

    return rotated(q), rotated(k)


def _wide_attention(model: Any) -> None:
    """Sums of attention in float64."""
    for layer in model.model.layers:
        attention = layer.self_attn
        sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        attention.attn.forward = partial(_attend, sizes)


def _attend(sizes: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads, kv_heads, size = sizes
    q_HTD, k_GTD, v_GTD = (
        one.view(len(one), number, size).transpose(0, 1).double()
        for one, number in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    k_HTD, v_HTD = (one.repeat_interleave(heads // kv_heads, 0) for one in (k_GTD, v_GTD))
    out = nn.functional.scaled_dot_product_attention(q_HTD, k_HTD, v_HTD, is_causal=True)
    return out.transpose(0, 1).flatten(1).to(NARROW)


_PARTS: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("vLLM in bfloat16", _products),
    ("vLLM, head in float32", _wide_head),
    ("and residual stream and norms in float32", _wide_norms),
    ("and the last norm not rounded", _wide_last_norm),
    ("and the rotary embedding in float32", _wide_rotary),
    ("and attention added up in float64", _wide_attention),
)


def _report(rows: Sequence[Row], path: Path | None) -> None:
    truth, trainer = rows[0].logprobs_T, next(r for r in rows if r.name == "trainer, autocast")
    table = Table(title=f"Mean difference, {len(truth)} tokens", title_justify="left")
    for column in ("", "from truth", "from the trainer"):
        table.add_column(column)
    numbers: dict[str, float] = {}
    for row in rows[1:]:
        found = [
            float((row.logprobs_T - other).abs().mean()) for other in (truth, trainer.logprobs_T)
        ]
        numbers |= {f"{row.name}.truth": found[0], f"{row.name}.trainer": found[1]}
        table.add_row(row.name, *(f"{one:.2g}" for one in found))
    Console(width=120).print(table)
    keep(numbers, path)


if __name__ == "__main__":
    main()
