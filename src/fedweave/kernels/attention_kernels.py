"""The Triton kernels of ``kernels/attention.py``."""

from fedweave.kernels import tl, triton

if triton is not None:

    @triton.jit
    def _inside(live, c, W: tl.constexpr, D: tl.constexpr):
        """[tokens, D] what exists: rows that are live, and columns where D is more than the head's width."""
        if W == D:
            return live[:, None]
        else:
            return live[:, None] & (c < W)[None, :]

    @triton.jit
    def _rows(x, t, head, row, head_row, c, live, W: tl.constexpr, D: tl.constexpr):
        """[tokens, D] of one head."""
        at = x + t.to(tl.int64)[:, None] * row + head * head_row + c[None, :]
        return tl.load(at, _inside(live, c, W, D), 0.0)

    @triton.jit
    def _pairs(
        k, v, begin, end, kv, k_row, k_head, v_row, v_head, c,
        COUNT: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    ):  # fmt: skip
        """COUNT tokens from ``begin``, which of them exist, and their keys and values [COUNT, D] of one head."""
        j = begin + tl.arange(0, COUNT)
        near = j < end
        keys = _rows(k, j, kv, k_row, k_head, c, near, W, D)
        return j, near, keys, _rows(v, j, kv, v_row, v_head, c, near, W, D)

    @triton.jit
    def _turned(a, b, cos, sin, t, c, live, W: tl.constexpr, BACK: tl.constexpr):
        """Both halves [tokens, W / 2] of rows rotated by their positions, or back again; in float32."""
        at = t.to(tl.int64)[:, None] * W + c[None, :]
        cosine = tl.load(cos + at, live[:, None], 1.0).to(tl.float32)
        sine = tl.load(sin + at, live[:, None], 0.0).to(tl.float32)
        if BACK:
            sine = -sine
        return a * cosine - b * sine, b * cosine + a * sine

    @triton.jit
    def _turn_rows(x, cos, sin, t, head, row, head_row, live, W: tl.constexpr):
        """Rotate one head's rows where they lie; both halves [tokens, W / 2] as they are now."""
        c = tl.arange(0, W // 2)
        left = x + t.to(tl.int64)[:, None] * row + head * head_row + c[None, :]
        a = tl.load(left, live[:, None], 0.0).to(tl.float32)
        b = tl.load(left + W // 2, live[:, None], 0.0).to(tl.float32)
        a, b = _turned(a, b, cos, sin, t, c, live, W, False)
        a, b = a.to(x.dtype.element_ty), b.to(x.dtype.element_ty)
        tl.store(left, a, live[:, None])
        tl.store(left + W // 2, b, live[:, None])
        return a, b

    @triton.jit
    def turn_keys_kernel(k, cos, sin, T, k_row, k_head, TOKENS: tl.constexpr, HALF: tl.constexpr):
        t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        _turn_rows(k, cos, sin, t, tl.program_id(1), k_row, k_head, t < T, 2 * HALF)

    @triton.jit
    def _store_slope(
        x, value, cos, sin, t, head, row, head_row, c, live, TURNED: tl.constexpr, W: tl.constexpr, D: tl.constexpr
    ):
        """One head's gradient [tokens, D], rotated back where its rows were rotated."""
        at = x + t.to(tl.int64)[:, None] * row + head * head_row
        if TURNED:
            halves = tl.permute(tl.reshape(value, (value.shape[0], 2, W // 2)), (0, 2, 1))
            a, b = tl.split(halves)
            near = tl.arange(0, W // 2)
            a, b = _turned(a, b, cos, sin, t, near, live, W, True)
            tl.store(at + near[None, :], a.to(x.dtype.element_ty), live[:, None])
            tl.store(at + near[None, :] + W // 2, b.to(x.dtype.element_ty), live[:, None])
        else:
            tl.store(at + c[None, :], value.to(x.dtype.element_ty), _inside(live, c, W, D))

    @triton.jit
    def _scores(a, b, scale, softcap, CAPPED: tl.constexpr):
        """Scaled scores [A, B] of rows a and b, capped where the model caps them."""
        s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
        if CAPPED:
            s = softcap * (
                1 - 2 / (tl.exp2(s * (2 * 1.4426950408889634 / softcap)) + 1)
            )  # softcap · tanh(s / softcap)
        return s

    @triton.jit
    def attend_kernel(
        q, k, v, cos, sin, tiles, out, lse, scale, softcap, HEADS, q_row, q_head, k_row, k_head, v_row, v_head,
        GROUP: tl.constexpr, CAPPED: tl.constexpr, TURNED: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        tile, head = tiles + tl.program_id(0) * 3, tl.program_id(1)
        first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        if first < end:
            t, c = first + tl.arange(0, BLOCK), tl.arange(0, D)
            live = t < end
            if TURNED:
                a, b = _turn_rows(q, cos, sin, t, head, q_row, q_head, live, W)
                mine = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BLOCK, D))
            else:
                mine = _rows(q, t, head, q_row, q_head, c, live, W, D)
            most = tl.full([BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            acc = tl.zeros([BLOCK, D], tl.float32)
            for begin in range(start, tl.minimum(first + BLOCK, end), STEP):
                j, near, keys, values = _pairs(
                    k, v, begin, end, head // GROUP, k_row, k_head, v_row, v_head, c, STEP, W, D
                )
                s = _scores(mine, keys, scale, softcap, CAPPED) * 1.4426950408889634
                s = tl.where((j[None, :] <= t[:, None]) & near[None, :], s, float("-inf"))
                above = tl.maximum(most, tl.max(s, 1))
                shrink = tl.exp2(most - above)
                p = tl.exp2(s - above[:, None])
                total = total * shrink + tl.sum(p, 1)
                acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
                most = above
            wide = t.to(tl.int64) * HEADS + head
            inside = _inside(live, c, W, D)
            tl.store(out + wide[:, None] * W + c[None, :], (acc / total[:, None]).to(out.dtype.element_ty), inside)
            tl.store(lse + wide, most + tl.log2(total), live)

    @triton.jit
    def _slopes(s, p, dp, delta, softcap, CAPPED: tl.constexpr):
        """Gradient of the scaled scores before the cap: p (dp - delta), times 1 - tanh²."""
        ds = p * (dp - delta)
        if CAPPED:
            ds = ds * (1 - (s / softcap) * (s / softcap))
        return ds

    @triton.jit
    def attend_dq_kernel(
        q, k, v, cos, sin, tiles, out, do, lse, delta, dq, dq_row, dq_head,
        scale, softcap, HEADS, q_row, q_head, k_row, k_head, v_row, v_head,
        GROUP: tl.constexpr, CAPPED: tl.constexpr, TURNED: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        tile, head = tiles + tl.program_id(0) * 3, tl.program_id(1)
        first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        if first < end:
            t, c = first + tl.arange(0, BLOCK), tl.arange(0, D)
            live = t < end
            mine = _rows(q, t, head, q_row, q_head, c, live, W, D)
            slope = _rows(do, t, head, HEADS * W, W, c, live, W, D)
            wide = t.to(tl.int64) * HEADS + head
            answer = _rows(out, t, head, HEADS * W, W, c, live, W, D)
            across = tl.sum(slope.to(tl.float32) * answer.to(tl.float32), 1)
            tl.store(delta + wide, across, live)
            norm = tl.load(lse + wide, live, 0.0)
            acc = tl.zeros([BLOCK, D], tl.float32)
            for begin in range(start, tl.minimum(first + BLOCK, end), STEP):
                j, near, keys, values = _pairs(
                    k, v, begin, end, head // GROUP, k_row, k_head, v_row, v_head, c, STEP, W, D
                )
                s = _scores(mine, keys, scale, softcap, CAPPED)
                seen = (j[None, :] <= t[:, None]) & near[None, :]
                p = tl.where(seen, tl.exp2(s * 1.4426950408889634 - norm[:, None]), 0.0)
                dp = tl.dot(slope, tl.trans(values), input_precision="ieee")
                ds = _slopes(s, p, dp, across[:, None], softcap, CAPPED)
                acc += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
            _store_slope(dq, acc * scale, cos, sin, t, head, dq_row, dq_head, c, live, TURNED, W, D)

    @triton.jit
    def attend_dkv_kernel(
        q, k, v, cos, sin, tiles, do, lse, delta, dk, dv, dk_row, dk_head,
        scale, softcap, HEADS, q_row, q_head, k_row, k_head, v_row, v_head,
        GROUP: tl.constexpr, CAPPED: tl.constexpr, TURNED: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        tile, kv = tiles + tl.program_id(0) * 3, tl.program_id(1)
        first, end = tl.load(tile), tl.load(tile + 2)
        if first < end:
            c = tl.arange(0, D)
            j, near, keys, values = _pairs(k, v, first, end, kv, k_row, k_head, v_row, v_head, c, BLOCK, W, D)
            to_k = tl.zeros([BLOCK, D], tl.float32)
            to_v = tl.zeros([BLOCK, D], tl.float32)
            for head in range(kv * GROUP, (kv + 1) * GROUP):
                for begin in range(first, end, STEP):
                    t = begin + tl.arange(0, STEP)
                    live = t < end
                    theirs = _rows(q, t, head, q_row, q_head, c, live, W, D)
                    slope = _rows(do, t, head, HEADS * W, W, c, live, W, D)
                    wide = t.to(tl.int64) * HEADS + head
                    norm, across = tl.load(lse + wide, live, 0.0), tl.load(delta + wide, live, 0.0)
                    s = _scores(keys, theirs, scale, softcap, CAPPED)  # [keys, queries]
                    seen = (j[:, None] <= t[None, :]) & near[:, None] & live[None, :]
                    p = tl.where(seen, tl.exp2(s * 1.4426950408889634 - norm[None, :]), 0.0)
                    to_v += tl.dot(p.to(slope.dtype), slope, input_precision="ieee")
                    dp = tl.dot(values, tl.trans(slope), input_precision="ieee")
                    ds = _slopes(s, p, dp, across[None, :], softcap, CAPPED)
                    to_k += tl.dot(ds.to(theirs.dtype), theirs, input_precision="ieee")
            _store_slope(dk, to_k * scale, cos, sin, j, kv, dk_row, dk_head, c, near, TURNED, W, D)
            _store_slope(dv, to_v, cos, sin, j, kv, dk_row, dk_head, c, near, False, W, D)
