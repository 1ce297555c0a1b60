"""The Triton kernels of ``kernels/products.py``.

Of everything that differs between targets a kernel takes three, ``w_0``, ``w_1`` and ``w_2``, and a block looks at
its own target's.
"""

from fedweave.kernels import tl, triton
from fedweave.kernels.gated import squashed_gate

if triton is not None:
    _VARY = ["layer_0", "layer_1", "layer_2", "threshold"]  # from layer to layer: no reason to compile anew

    @triton.jit
    def _mix(x):
        """The 32-bit hash of kernels/dropout.py."""
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D
        x = x ^ (x >> 15)
        return x * -2073319277

    @triton.jit
    def _kept(keys, t, live, c, layer, threshold):
        """[tokens, channels] what dropout keeps."""
        token = tl.load(keys + t, live, 0)
        channel = _mix(c * 2 + 1 + (layer + 1) * 40503)
        return _mix(token[:, None] ^ channel[None, :]) >= threshold

    @triton.jit
    def _pick(g, zero, one, two):
        """Target g's of three."""
        return tl.where(g == 0, zero, tl.where(g == 1, one, two))

    @triton.jit
    def _of_block(block, end_0, end_1):
        """The target of a block among those of all, and which of its own blocks that is."""
        g = (block >= end_0).to(tl.int32) + (block >= end_1).to(tl.int32)
        return g, block - _pick(g, 0, end_0, end_1)

    @triton.jit(do_not_specialize=_VARY)
    def lane_reduce_kernel(
        x, w_0, w_1, w_2, out, gated, u, gates, dgates, keys, tiles,
        layer_0, layer_1, layer_2, start_0, start_1, start_2, width_0, width_1, width_2,
        threshold, inflate, scale, x_row, w_lane, T, MR, M, RANK,
        DROP: tl.constexpr, BACK: tl.constexpr, GATED: tl.constexpr, SLOPE: tl.constexpr,
        R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        g, tile = tl.program_id(0), tiles + tl.program_id(1) * 3
        start, end, lane = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        if start < end:
            w, N = _pick(g, w_0, w_1, w_2) + lane * w_lane, _pick(g, width_0, width_1, width_2)
            source, layer = x + _pick(g, start_0, start_1, start_2), _pick(g, layer_0, layer_1, layer_2)
            t = start + tl.arange(0, TOKENS)
            live = t < end
            wide_t = t.to(tl.int64)
            r = tl.arange(0, R)
            acc = tl.zeros([TOKENS, R], tl.float32)
            for first in range(0, N, COLUMNS):
                c = first + tl.arange(0, COLUMNS)
                rows = tl.load(source + wide_t[:, None] * x_row + c[None, :], live[:, None] & (c < N)[None, :], 0.0)
                if DROP:
                    kept = _kept(keys, t, live, c, layer, threshold)
                    rows = tl.where(kept, rows.to(tl.float32) * inflate, 0.0).to(rows.dtype)
                part = tl.load(w + r[None, :] * N + c[:, None], (r < MR)[None, :] & (c < N)[:, None], 0.0)
                acc = tl.dot(rows, part, acc, input_precision="ieee")  # part [COLUMNS, R]
            own_t = wide_t + g.to(tl.int64) * T  # a row of this target's
            at = own_t[:, None] * MR + r[None, :]
            inside = live[:, None] & (r < MR)[None, :]
            if BACK:
                acc = acc * scale
            rows = acc.to(out.dtype.element_ty)
            if GATED:
                gate = tl.load(gates + wide_t[:, None] * M + (r // RANK)[None, :], inside, 0.0)
                if BACK:
                    if SLOPE:
                        slope = tl.load(u + at, inside, 0.0).to(tl.float32) * acc
                        for m in range(0, M):  # sums over each expert's r columns
                            own = tl.sum(tl.where((r // RANK == m)[None, :], slope, 0.0), 1)
                            tl.store(dgates + own_t * M + m, own, live)
                    rows = (acc * gate).to(out.dtype.element_ty)
                else:
                    tl.store(gated + at, (rows.to(tl.float32) * gate).to(out.dtype.element_ty), inside)
            tl.store(out + at, rows, inside)

    @triton.jit
    def _expanded(u, w, own_t, live, c, N, MR, R: tl.constexpr):
        """[tokens, columns] of u W."""
        r = tl.arange(0, R)
        rows = tl.load(u + own_t[:, None] * MR + r[None, :], live[:, None] & (r < MR)[None, :], 0.0)
        part = tl.load(w + r[:, None] * N + c[None, :], (r < MR)[:, None] & (c < N)[None, :], 0.0)
        return tl.dot(rows, part, input_precision="ieee")

    @triton.jit
    def lane_expand_kernel(
        y, u, w_0, w_1, w_2, tiles, start_0, start_1, start_2, width_0, width_1, width_2, end_0, end_1,
        scale, y_row, w_lane, T, MR, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        tile = tiles + tl.program_id(0) * 3
        start, end, lane = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        if start < end:
            g, block = _of_block(tl.program_id(1), end_0, end_1)
            w, N = _pick(g, w_0, w_1, w_2) + lane * w_lane, _pick(g, width_0, width_1, width_2)
            t = (start + tl.arange(0, TOKENS)).to(tl.int64)
            c = block * COLUMNS + tl.arange(0, COLUMNS)
            live = t < end
            acc = _expanded(u, w, t + g.to(tl.int64) * T, live, c, N, MR, R) * scale
            to = y + _pick(g, start_0, start_1, start_2) + t[:, None] * y_row + c[None, :]
            inner = live[:, None] & (c < N)[None, :]
            tl.store(to, (acc + tl.load(to, inner, 0.0).to(tl.float32)).to(y.dtype.element_ty), inner)

    @triton.jit
    def _given_back(
        u, w, own_t, t, live, c, keys, layer, threshold, inflate, N, MR, DROP: tl.constexpr, R: tl.constexpr
    ):
        acc = _expanded(u, w, own_t, live, c, N, MR, R)
        if DROP:
            acc = tl.where(_kept(keys, t, live, c, layer, threshold), acc * inflate, 0.0)
        return acc

    @triton.jit(do_not_specialize=_VARY)
    def lane_expand_back_kernel(
        dx, du, w_0, w_1, w_2, keys, tiles, layer_0, layer_1, layer_2, threshold, inflate,
        dx_row, w_lane, T, N, MR, COUNT: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr,
        R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        tile = tiles + tl.program_id(0) * 3
        start, end, lane = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        if start < end:
            t = start + tl.arange(0, TOKENS)
            c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            live, wide_t, off = t < end, t.to(tl.int64), lane * w_lane
            acc = _given_back(du, w_0 + off, wide_t, t, live, c, keys, layer_0, threshold, inflate, N, MR, DROP, R)
            if COUNT > 1:
                acc += _given_back(
                    du, w_1 + off, wide_t + T, t, live, c, keys, layer_1, threshold, inflate, N, MR, DROP, R
                )
            if COUNT > 2:
                acc += _given_back(
                    du, w_2 + off, wide_t + 2 * T, t, live, c, keys, layer_2, threshold, inflate, N, MR, DROP, R
                )
            to = dx + wide_t[:, None] * dx_row + c[None, :]
            inner = live[:, None] & (c < N)[None, :]
            if ADD:
                acc += tl.load(to, inner, 0.0).to(tl.float32)
            tl.store(to, acc.to(dx.dtype.element_ty), inner)

    @triton.jit
    def _input(x, inverse, norm, t, live, c, row, N, SOURCE: tl.constexpr):
        """[tokens, columns] of an input, made of what is kept of it (kernels/source.py)."""
        inside = live[:, None] & (c < N)[None, :]
        at = x + t[:, None] * row + c[None, :]
        columns = tl.load(at, inside, 0.0)
        if SOURCE == 1:
            w = tl.load(norm + c, c < N, 0.0)
            unit = (columns.to(tl.float32) * tl.load(inverse + t, live, 0.0)[:, None]).to(w.dtype)
            columns = (w[None, :] * unit).to(columns.dtype)
        if SOURCE >= 2:
            gate, up = columns.to(tl.float32), tl.load(at + N, inside, 0.0)
            squashed, _ = squashed_gate(gate, SOURCE == 3)
            columns = (gate * squashed).to(up.dtype) * up
        return columns

    @triton.jit
    def _outer_sum(
        left, right, inverse, norm, out, keys, start, end, block, layer, threshold, inflate, scale, row, N, MR,
        SOURCE: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr,
        R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """out [MR, N] (+)= scale · leftᵀ dropout(right) over the tokens from start to end, one block of columns."""
        r = tl.arange(0, R)
        c = block * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([R, COLUMNS], tl.float32)
        for first in range(start, end, TOKENS):
            t = first + tl.arange(0, TOKENS)
            live = t < end
            wide_t = t.to(tl.int64)
            inside = live[None, :] & (r < MR)[:, None]
            rows = tl.load(left + wide_t[None, :] * MR + r[:, None], inside, 0.0)  # [R, TOKENS]
            columns = _input(right, inverse, norm, wide_t, live, c, row, N, SOURCE)
            if DROP:
                kept = _kept(keys, t, live, c, layer, threshold)
                columns = tl.where(kept, columns.to(tl.float32) * inflate, 0.0).to(columns.dtype)
            acc = tl.dot(rows, columns, acc, input_precision="ieee")
        at = out + r[:, None] * N + c[None, :]
        inner = (r < MR)[:, None] & (c < N)[None, :]
        acc = acc * scale
        if ADD:
            acc += tl.load(at, inner, 0.0).to(tl.float32)
        tl.store(at, acc.to(out.dtype.element_ty), inner)

    @triton.jit(do_not_specialize=_VARY)
    def lane_outer_kernel(
        du, x, inverse, norm, gu, dy, da_0, da_1, da_2, db_0, db_1, db_2, keys, spans,
        layer_0, layer_1, layer_2, start_0, start_1, start_2, width_0, width_1, width_2,
        threshold, inflate, scale, first, second, end_0, end_1, x_row, dy_row, out_lane, T, N, MR,
        SOURCE: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr,
        R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        start, end = tl.load(spans + lane * 2), tl.load(spans + lane * 2 + 1)
        if block < second:
            g = block // first
            layer, left = _pick(g, layer_0, layer_1, layer_2), du + g.to(tl.int64) * T * MR
            out = _pick(g, da_0, da_1, da_2) + lane * out_lane
            _outer_sum(left, x, inverse, norm, out, keys, start, end, block - g * first, layer, threshold, inflate,
                       1.0, x_row, N, MR, SOURCE, DROP, ADD, R, TOKENS, COLUMNS)  # fmt: skip
        else:
            g, own = _of_block(block - second, end_0, end_1)
            right, left = dy + _pick(g, start_0, start_1, start_2), gu + g.to(tl.int64) * T * MR
            out, width = _pick(g, db_0, db_1, db_2) + lane * out_lane, _pick(g, width_0, width_1, width_2)
            _outer_sum(left, right, inverse, norm, out, keys, start, end, own, 0, threshold, inflate,
                       scale, dy_row, width, MR, 0, False, ADD, R, TOKENS, COLUMNS)  # fmt: skip
