"""Fixtures of the tests of the scripts."""
import numpy as np
import pytest

import helpers  # noqa: F401 turns on Triton's interpreter before anything imports Triton
import prepare_fineweb


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Token shards made from generated text: 120 documents, 20 % of them held out."""
    root = tmp_path_factory.mktemp("data")
    (root / "text").mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(26, size=rng.integers(2, 9))) for _ in range(200)]
    for i in range(120):
        text = " ".join(rng.choice(words, size=rng.integers(50, 300)))
        (root / "text" / f"{i:03d}.txt").write_text(text + ("\n<|endoftext|> é ☃" if i % 10 == 0 else ""), "utf-8")
    prepare_fineweb.main([f"--source={root}/text", f"--out={root}/shards", "--holdout=10", "--shard_tokens=30000",
                          "--workers=1"])
    return root / "shards"
