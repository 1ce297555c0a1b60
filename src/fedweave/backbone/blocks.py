"""Where quantised matrices come from: GGUF's blocks, or NF4 made here.

A GGUF row is blocks of 32 or 256 numbers, each with its scales, codes and, where a code has more than 4 bits, the
upper bits apart. Here the same codes and scales are laid out as ``kernels/dequantise.py`` reads them; nothing is
rounded. Only the 6-bit scales of the K formats take a byte each (4.5 bits a number become 4.6).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedweave.kernels.dequantise import GROUP_BYTES, NF4, Format, Quantised

Read = Callable[[Format, Tensor], Quantised]  # of blocks [m, blocks of a row, bytes] uint8


def _halves(nibbles: Tensor) -> Tensor:
    """Bytes [..., k] to codes [..., 2k]: all low halves, then all high ones."""
    return torch.cat([nibbles & 15, nibbles >> 4], -1)


def _floats(data: Tensor) -> Tensor:
    """[m, blocks, 2] bytes to [m, blocks] float16."""
    return data.contiguous().view(torch.float16)[..., 0]


def _of_32(format: Format, blocks: Tensor) -> Quantised:
    """scale, minimum (Q4_1, Q5_1), fifth bits (Q5_0, Q5_1), codes."""
    at, minimum = 2, None
    if format.name.endswith("_1"):
        minimum, at = _floats(blocks[..., 2:4]), 4
    # of 8 bits they are signed, and a byte wraps
    codes = blocks[..., at:] + 128 if format.bits == 8 else _halves(blocks[..., -16:])
    if format.bits == 5:  # bit i of four bytes belongs to number i
        bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)
        codes |= (bits.flatten(-2) & 1) << 4
    return Quantised.of(format, codes.flatten(1), _floats(blocks[..., :2]), minimum=minimum)


def _of_256(format: Format, blocks: Tensor) -> Quantised:
    """Q4_K, Q5_K: scale, scale of the minima, 8 + 8 steps of 6 bits, fifth bits (Q5_K), codes."""
    six = blocks[..., 4:16]
    a, b, c = six[..., :4], six[..., 4:8], six[..., 8:]
    steps = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], -1)  # [m, blocks, 8]
    minima = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], -1)
    codes = _halves(blocks[..., -128:].unflatten(-1, (4, 32)))  # [m, blocks, 4, 64]
    if format.bits == 5:  # bit k of byte l belongs to number 32 k + l
        bits = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]  # [m, blocks, 8, 32]
        codes |= ((bits & 1) << 4).unflatten(-2, (4, 2)).flatten(-2)
    return Quantised.of(
        format,
        codes.flatten(1),
        _floats(blocks[..., :2]),
        steps=steps.flatten(1),
        minimum=-_floats(blocks[..., 2:4]),  # the file says what is taken away
        minimum_steps=minima.flatten(1),
    )


def _q6_k(format: Format, blocks: Tensor) -> Quantised:
    """Lower 4 bits, upper 2 bits, 16 signed steps, scale; codes in two halves of 128."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    pairs = (high >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)) & 3  # [m, blocks, 2, 4, 32]
    codes = _halves(low) | (pairs.flatten(-2) << 4)  # [m, blocks, 2, 128]
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return Quantised.of(format, codes.flatten(1), _floats(blocks[..., 208:]), steps=steps.flatten(1))


# Format, numbers and bytes of a block, and how one is read
GGUF: Mapping[str, tuple[Format, int, int, Read]] = {
    "Q4_0": (Format("Q4_0", 4, 32, zero=8), 32, 18, _of_32),
    "Q4_1": (Format("Q4_1", 4, 32), 32, 20, _of_32),
    "Q5_0": (Format("Q5_0", 5, 32, zero=16), 32, 22, _of_32),
    "Q5_1": (Format("Q5_1", 5, 32), 32, 24, _of_32),
    "Q8_0": (Format("Q8_0", 8, 32, zero=128), 32, 34, _of_32),
    "Q4_K": (Format("Q4_K", 4, 32), 256, 144, _of_256),
    "Q5_K": (Format("Q5_K", 5, 32), 256, 176, _of_256),
    "Q6_K": (Format("Q6_K", 6, 16, zero=32), 256, 210, _q6_k),
}


def read_blocks(kind: str, data: Tensor) -> Quantised:
    """Rows of a GGUF tensor of this kind, [m, bytes] uint8."""
    format, _, size, read = GGUF[kind]
    return read(format, data.unflatten(1, (-1, size)))


def kept_bytes(kind: str, size: int, groups: bool) -> int:
    """Memory of a GGUF tensor of this kind, which takes so many bytes in its file; ``groups``: where they may lie
    side by side."""
    format, numbers, block, _ = GGUF[kind]
    if groups and numbers == format.group and format.bits in GROUP_BYTES:
        return size // block * GROUP_BYTES[format.bits]
    return size + size // block * (4 if kind in ("Q4_K", "Q5_K") else 0)  # 16 scales of 6 bits, a byte each


# -------------------------------------------------------------------------------------- NF4

_NF4 = Format("NF4", 4, 64, table=NF4)


def make_nf4(weight: Tensor, double: bool = False) -> Quantised:
    """A matrix [m, n], n a multiple of 64, with the largest size of 64 numbers as their scale; ``double``: as so
    many of 255 steps up to the largest of its row. It starts from bfloat16, so that every machine makes the same
    codes."""
    groups = weight.bfloat16().float().unflatten(1, (-1, _NF4.group))  # [m, groups, 64]
    scale, steps = groups.abs().amax(-1), None  # [m, groups]
    if double:
        top = scale.amax(1, keepdim=True)
        steps = (scale / top.clamp(min=1e-30) * 255).round_().to(torch.uint8)
        scale = top / 255
    shown = scale if steps is None else scale * steps
    table = torch.tensor(NF4, device=weight.device)
    unit = groups / shown.clamp(min=1e-30)[..., None]
    codes = torch.bucketize(unit.flatten(1), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return Quantised.of(_NF4, codes, scale, steps=steps)


def nf4_bits(columns: int, double: bool) -> float:
    """Bits of a number, scales included, in rows of so many."""
    return 4 + (8 / 64 + 32 / columns if double else 32 / 64)
