"""Alignment distance against a direct computation, and the choice of M."""

import numpy as np
import pytest
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score, silhouette_score

from fedweave.alignment.align import align, cuts, signature_distance
from fedweave.discovery.silhouette import silhouette


def direct(blocks: list[np.ndarray]) -> np.ndarray:
    """The double loop over pairs and blocks that the paper writes down."""
    count = len(blocks[0])
    out = np.zeros((count, count))
    for u in range(count):
        for v in range(count):
            total = 0.0
            for block in blocks:
                a, b = block[u], block[v]
                na, nb = np.linalg.norm(a), np.linalg.norm(b)
                if na == 0 and nb == 0:
                    continue
                total += 1.0 if na == 0 or nb == 0 else 1 - a @ b / (na * nb)
            out[u, v] = total / len(blocks)
    return out


def test_distance_is_the_mean_over_blocks_of_one_minus_cosine():
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(6, size)) for size in (5, 9, 3)]
    np.testing.assert_allclose(signature_distance(blocks), direct(blocks), atol=1e-6)


def test_zero_blocks_have_a_distance_not_nan():
    rng = np.random.default_rng(1)
    blocks = [rng.normal(size=(4, 5)), rng.normal(size=(4, 5))]
    blocks[0][0] = blocks[0][1] = 0.0
    distance = signature_distance(blocks)
    np.testing.assert_allclose(distance, direct(blocks), atol=1e-6)
    assert np.isfinite(distance).all() and not np.diag(distance).any()


def groups(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    centres = rng.normal(size=(len(sizes), 40))
    return signature_distance([centres[labels] + 0.1 * rng.normal(size=(len(labels), 40))]), labels


@pytest.mark.parametrize("sizes", [[4, 4], [5, 3, 6], [4, 4, 4, 4]])
def test_m_is_the_number_of_groups(sizes):
    distance, labels = groups(sizes)
    alignment = align(distance, max_experts=8)
    assert alignment.experts == len(sizes) and alignment.labels.tolist() == labels.tolist()
    assert alignment.silhouettes[alignment.experts] == max(alignment.silhouettes.values())


def test_candidates_end_one_below_the_number_of_prototypes_and_the_limit():
    distance, _ = groups([2, 2])
    assert list(align(distance, 8).silhouettes) == [2, 3]
    assert "only 4 prototypes" in align(distance, 8).note
    assert list(align(groups([5, 5])[0], 3).silhouettes) == [2, 3]


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_prototypes_make_one_expert(count):
    alignment = align(np.ones((count, count)) - np.eye(count), 8)
    assert alignment.experts == 1 and "too few" in alignment.note


def test_equal_signatures_make_one_expert():
    assert align(np.zeros((5, 5)), 8).experts == 1


def test_one_tree_gives_what_a_clustering_per_count_gives():
    """Every cut and its silhouette, against scikit-learn's own."""
    rng = np.random.default_rng(3)
    distance = signature_distance([rng.normal(size=(80, 12)) + rng.normal(size=12) for _ in range(3)])
    for count, labels in enumerate(cuts(distance, 9), start=2):
        model = AgglomerativeClustering(count, metric="precomputed", linkage="average")
        expected = model.fit_predict(distance)
        assert len(np.unique(labels)) == count and adjusted_rand_score(labels, expected) == 1.0
        reference = silhouette_score(distance.astype(float), expected, metric="precomputed")
        assert silhouette(distance, labels) == pytest.approx(reference, abs=1e-6)


def test_one_expert_where_nothing_parts_the_buckets_well_enough():
    distance, _ = groups([5, 5])
    score = align(distance, 4).silhouettes[2]
    assert align(distance, 4, least=score - 1e-3).experts == 2
    alignment = align(distance, 4, least=min(1.0, score + 1e-3))
    assert alignment.experts == 1 and not alignment.labels.any() and alignment.silhouettes[2] == score


def test_a_cut_with_an_expert_of_too_few_examples_is_no_candidate():
    distance, _ = groups([5, 5, 1])
    sizes = np.array([10] * 10 + [1])
    assert align(distance, 3).experts == 3
    assert align(distance, 3, sizes=sizes, min_share=0.02).experts == 2
    lonely = align(distance, 3, sizes=np.array([1] * 5 + [1000] * 5 + [1]), min_share=0.02)
    assert lonely.experts == 1


def test_ward_does_not_chain():
    """Points in a row, each near the next: average linkage cuts the lone end off, Ward cuts in the middle."""
    angle = np.deg2rad(np.array([0.0, 6, 12, 18, 24, 30, 36, 42, 75]))
    distance = 1 - np.cos(angle[:, None] - angle)
    average, ward = (next(iter(cuts(distance, 2, method))) for method in ("average", "ward"))
    assert np.bincount(average).min() == 1 and np.bincount(ward).min() >= 3
