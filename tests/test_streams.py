"""Seeds are a format: runs resume, and sites agree on sketches, only while the same names give the same numbers."""

from fedweave.streams import stream_key


def test_keys_never_change():
    assert stream_key("participants", 42, 1) == 1_486_589_728_274_017_892
    assert stream_key("dropout", "warmup", 0, 3, 7) == 5_337_117_306_855_764_112
