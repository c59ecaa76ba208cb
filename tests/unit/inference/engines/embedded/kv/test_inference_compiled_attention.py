"""Attention in float64 that is compiled on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.inference.engines.embedded.kv import attention, compiled_attention
from services.inference.engines.embedded.kv.compiled_attention import CompiledAttention

_TOKENS = 700


@pytest.fixture
def compiled() -> CompiledAttention:
    """The compiled code; without a compiler there is none to test."""
    try:
        compiled_attention._compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = compiled_attention.compiled_attention()
    assert found is not None
    return found


@pytest.fixture
def forget() -> Iterator[None]:
    """Compile again at the next use, before and after a test."""
    compiled_attention.compiled_attention.cache_clear()
    yield
    compiled_attention.compiled_attention.cache_clear()


def _plain(
    q_ABSD: torch.Tensor, k_ABTD: torch.Tensor, v_ABTD: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores_ABST = q_ABSD @ k_ABTD.double().transpose(-1, -2) * 0.3
    if bias is not None:
        scores_ABST = scores_ABST + bias
    return scores_ABST.softmax(-1) @ v_ABTD.double(), scores_ABST.logsumexp(-1)


def _given(queries: int, tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and views of a slab that is longer and has more rows, as a decode step has them."""
    torch.manual_seed(queries * 1000 + tokens + size)
    slab = torch.randn(2, 4, 2, _TOKENS, size).bfloat16()
    q_ABSD = torch.randn(3, 2, queries, size).bfloat16().double()
    return q_ABSD, slab[0, :3, :, :tokens], slab[1, :3, :, :tokens]


@pytest.mark.parametrize("size", [16, 64, 80, 256])
@pytest.mark.parametrize("tokens", [1, 5, 256, 257, 699])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 6, 7, 13])
def test_it_computes_attention_in_float64(
    compiled: CompiledAttention, queries: int, tokens: int, size: int
) -> None:
    """Every number of queries, blocks of keys that are full or not, and every size of heads give
    torch's results in float64."""
    given = _given(queries, tokens, size)
    assert compiled.takes(*given)
    found, expected = compiled(*given, bias=None, scale=0.3), _plain(*given, None)
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() < 1e-13


@pytest.mark.parametrize("by_query", [False, True])
def test_masked_keys_take_no_part(compiled: CompiledAttention, by_query: bool) -> None:
    """Rows of other lengths, windows, masks of single queries and blocks that no query sees change
    nothing, whatever lies in the masked keys."""
    q_ABSD, k_ABTD, v_ABTD = _given(5, 690, 64)
    bias = torch.zeros(3, 1, 5 if by_query else 1, 690, dtype=torch.float64)
    bias[0, ..., 601:] = bias[1, ..., :300] = bias[2, ..., 3:] = -torch.inf
    bias[1, :, 0, 400:600] = -torch.inf
    if by_query:
        bias[0, :, 4, :520] = bias[2, :, 1, 1:] = -torch.inf
    expected = _plain(q_ABSD, k_ABTD, v_ABTD, bias)
    k_ABTD[0, :, 601:] = 1e30
    v_ABTD[2, :, 3:] = 1e30
    found = compiled(q_ABSD, k_ABTD, v_ABTD, bias=bias, scale=0.3)
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() < 1e-13


def test_threads_divide_the_heads(
    compiled: CompiledAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads compute the same bits."""
    given = _given(3, 640, 64)
    alone = compiled(*given, bias=None, scale=None)
    monkeypatch.setattr(compiled_attention, "_ELEMENTS_OF_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for one, right in zip(compiled(*given, bias=None, scale=None), alone, strict=True):
        assert torch.equal(one, right)


def test_large_scores_and_nan(compiled: CompiledAttention) -> None:
    """Scores of thousands neither overflow nor lose the largest one; NaN in a key is NaN in what
    its queries read, and in nothing else."""
    q_ABSD, k_ABTD, v_ABTD = _given(3, 300, 64)
    q_ABSD = q_ABSD * 300
    found = compiled(q_ABSD, k_ABTD, v_ABTD, bias=None, scale=0.3)
    expected = _plain(q_ABSD, k_ABTD, v_ABTD, None)
    for one, right in zip(found, expected, strict=True):
        assert torch.allclose(one, right, rtol=1e-12, atol=0)
    k_ABTD[1, 0, 7] = torch.nan
    out_ABSD, _ = compiled(q_ABSD, k_ABTD, v_ABTD, bias=None, scale=0.3)
    is_nan = out_ABSD.isnan().flatten(2).any(-1)
    assert is_nan.tolist() == [[False, False], [True, False], [False, False]]


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("compiler", ["", "false", "/absent/cc"])
def test_without_a_compiler_torch_computes_the_same(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a C compiler, and with one that fails, torch's kernel gives the same results."""
    q_ABSD, k_ABTD, v_ABTD = _given(3, 300, 64)
    monkeypatch.setenv("CC", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled_attention.compiled_attention() is None
    found = attention.attention_with_lse(q_ABSD, k_ABTD, v_ABTD, bias=None, scale=0.3)
    for one, right in zip(found, _plain(q_ABSD, k_ABTD, v_ABTD, None), strict=True):
        assert (one - right).abs().max() < 1e-13


@pytest.mark.usefixtures("compiled", "forget")
def test_wrong_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that computes something else is not used."""
    monkeypatch.setattr(compiled_attention, "_error", lambda _: 1e-6)
    assert compiled_attention.compiled_attention() is None
