"""Deltas between two versions of a tensor: exact, and refused when damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import HeldWeights
from forge.runtime.weights import delta as codec

ITEM_BYTES = [1, 2, 4, 8]


@given(
    st.sampled_from(ITEM_BYTES),
    st.binary(max_size=4096),
    st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=40),
)
def test_delta_is_exact(item_bytes: int, data: bytes, changes: list[tuple[int, int]]) -> None:
    """For any change of any bytes; more than half of the size is no delta."""
    base = data[: len(data) // item_bytes * item_bytes]
    new = bytearray(base)
    for at, value in changes:
        if at < len(new):
            new[at] = value
    delta = codec.encode(base, bytes(new), item_bytes=item_bytes)
    if delta is not None:
        assert len(delta) <= len(new) / 2
        assert codec.apply(base, delta, item_bytes=item_bytes) == new


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("far", [0, 254, 255, 256, 100_000])
def test_delta_of_few_elements_is_small(item_bytes: int, far: int) -> None:
    """Gaps of any length, the first and the last element, the largest difference."""
    base = np.zeros(200_000, f"u{item_bytes}")
    new = base.copy()
    new[[0, far, -1]] = 1, np.iinfo(new.dtype).max, np.iinfo(new.dtype).max // 2 + 1
    delta = codec.encode(base.tobytes(), new.tobytes(), item_bytes=item_bytes)
    assert delta is not None and len(delta) < 400
    assert codec.apply(base.tobytes(), delta, item_bytes=item_bytes) == new.tobytes()


def test_delta_spans_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is encoded block by block, the last one shorter."""
    monkeypatch.setattr(codec, "_BLOCK_ITEMS", 1000)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 10_500, np.uint16)
    new = base + (rng.random(10_500) < 0.02).astype(np.uint16)
    delta = codec.encode(base.tobytes(), new.tobytes(), item_bytes=2)
    assert delta is not None and len(delta) < 0.1 * new.nbytes
    assert codec.apply(base.tobytes(), delta, item_bytes=2) == new.tobytes()


def test_tensor_that_changed_everywhere_has_no_delta() -> None:
    """As float32 weights do: it travels whole."""
    rng = np.random.default_rng(0)
    base, new = rng.bytes(40_000), rng.bytes(40_000)
    assert codec.encode(base, new, item_bytes=4) is None


BASE = bytes(4000)
NEW = b"\1" + bytes(1999) + b"\2" + bytes(1999)
DELTA = codec.encode(BASE, NEW, item_bytes=2)


@given(st.data())
def test_damaged_delta_never_gives_other_data_unnoticed(data: st.DataObject) -> None:
    """It is refused with DataLoss, or gives data of the tensor's length, whose digest tells."""
    assert DELTA is not None
    damaged = bytearray(DELTA)
    for at in data.draw(st.lists(st.integers(0, len(DELTA) - 1), min_size=1, max_size=4)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(0, len(DELTA)))
    for wrong in (bytes(damaged), DELTA[:end], DELTA + bytes(damaged[:end])):
        try:
            assert len(codec.apply(BASE, wrong, item_bytes=2)) == len(BASE)
        except DataLoss as error:
            assert "the delta is damaged" in str(error)


@pytest.mark.parametrize(
    ("shape", "size_bytes", "item_bytes"),
    [((3, 4), 24, 2), ((), 4, 4), ((0,), 0, 1), ((3,), 10, 1), ((2,), 24, 1)],
)
def test_element_size_is_that_of_shape_and_bytes(
    shape: tuple[int, ...], size_bytes: int, item_bytes: int
) -> None:
    """An unusual one is taken as bytes."""
    assert codec.item_bytes(shape, size_bytes) == item_bytes


def held(data: bytes, dtype: str = "uint8") -> HeldWeights:
    tensor = NamedTensor(name="w", dtype=dtype, shape=(len(data),), data=data)
    return HeldWeights(tensors=(tensor,))


async def test_encoder_makes_each_delta_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the base, or against another type, there is none; old versions are forgotten."""
    made = []
    encode = codec.encode

    def counted(base: bytes, new: bytes, *, item_bytes: int) -> bytes | None:
        made.append(1)
        return encode(base, new, item_bytes=item_bytes)

    monkeypatch.setattr(codec, "encode", counted)
    versions = {1: held(BASE), 2: held(NEW), 3: held(NEW, "int8")}
    encoder = codec.DeltaEncoder()
    (first,) = await encoder.of(versions, 1, 2, [0])
    assert first is not None and (await encoder.of(versions, 1, 2, [0]))[0] is first
    assert await encoder.of(versions, 0, 2, [0]) == [None]
    assert await encoder.of(versions, 2, 3, [0]) == [None]
    assert len(made) == 1
    del versions[2]
    assert await encoder.of(versions, 1, 3, [0]) == [None]
    assert set(encoder._made) == {(2, 3), (1, 3)}
