"""Boosted trees that may come from a stranger: checked node by node, and written anew, before XGBoost sees them.

XGBoost believes its own files: a child or a feature that is not there is read from memory that is not the model's, and ends the
process. Only what is checked here reaches it; whatever else the file holds is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from dpro_search.collect.trace import Ints

_MOST_TREES, _MOST_NODES = 10_000, 1 << 20
_MOST_LEAF = 1e3  # of a logarithm: a model of ours has leaves below 1
_NO_PARENT = 2**31 - 1


class _Shape(msgspec.Struct):
    num_nodes: str
    num_feature: str


class _Tree(msgspec.Struct):
    tree_param: _Shape
    left_children: list[int]
    right_children: list[int]
    split_indices: list[int]
    split_conditions: list[float]  # of a leaf: its value
    default_left: list[int]
    split_type: list[int] = []


class _Trees(msgspec.Struct):
    trees: list[_Tree]


class _Booster(msgspec.Struct):
    name: str
    model: _Trees


class _Parameters(msgspec.Struct):
    num_feature: str
    base_score: str


class _Learner(msgspec.Struct):
    gradient_booster: _Booster
    learner_model_param: _Parameters


class _File(msgspec.Struct):
    learner: _Learner


def rewritten(data: bytes, features: int) -> bytes:
    """The trees of XGBoost's JSON, as JSON with nothing but them.

    Parameters
    ----------
    features
        Columns that the trees may look at.

    Raises
    ------
    ValueError
        They are no such trees, in words; msgspec's errors are some of these.
    """
    learner = msgspec.json.decode(data, type=_File).learner
    booster, parameters = learner.gradient_booster, learner.learner_model_param
    trees = booster.model.trees
    if booster.name != "gbtree" or parameters.num_feature != str(features):
        raise ValueError(f"{booster.name} with {parameters.num_feature} features, expected trees with {features}")
    if not 0 < len(trees) <= _MOST_TREES:
        raise ValueError(f"{len(trees)} trees")
    if float(parameters.base_score.strip("[]")) != 0.0:
        raise ValueError(f"a base score of {parameters.base_score}, expected 0")
    for number, tree in enumerate(trees):
        for wrong, what in _problems(tree, features):
            if wrong:
                raise ValueError(f"tree {number}: {what}")
    return msgspec.json.encode(_document(trees, features))


def _problems(tree: _Tree, features: int) -> Iterator[tuple[bool, str]]:
    nodes = len(tree.left_children)
    columns = (tree.right_children, tree.split_indices, tree.split_conditions, tree.default_left)
    yield not 0 < nodes <= _MOST_NODES, f"{nodes} nodes"
    yield any(len(column) != nodes for column in columns), "columns of different lengths"
    yield tree.tree_param.num_nodes != str(nodes), f"{tree.tree_param.num_nodes} nodes, and columns of {nodes}"
    yield any(tree.split_type), "a split by category"
    yield not set(tree.default_left) <= {0, 1}, "a direction that is neither left nor right"
    yield min(*tree.left_children, *tree.right_children, -1) < -1, "a child below -1"
    yield max(*tree.left_children, *tree.right_children, -1) >= nodes, "a child that is not there"
    left, right = np.array(tree.left_children), np.array(tree.right_children)
    yield bool(((left < 0) != (right < 0)).any()), "a node with one child"
    inner = np.flatnonzero(left >= 0)
    # Children come after their parents, so that no path goes in circles.
    yield bool((np.minimum(left, right)[inner] <= inner).any()), "a child before its parent"
    children = np.concatenate((left[inner], right[inner]))
    yield len(children) != nodes - 1 or len(np.unique(children)) != nodes - 1, "nodes that are no tree"
    yield not all(0 <= column < features for column in tree.split_indices), "a feature that is not there"
    values = np.array(tree.split_conditions)
    yield bool((np.abs(values[left < 0]) > _MOST_LEAF).any()), "an impossible leaf"
    yield bool((np.abs(values) > np.finfo(np.float32).max).any()), "a threshold beyond float32"


def _document(trees: list[_Tree], features: int) -> dict[str, object]:
    """As XGBoost 2.1 wrote it, which later ones read."""
    booster = {
        "model": {
            "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
            "iteration_indptr": [*range(len(trees) + 1)],
            "tree_info": [0] * len(trees),
            "trees": [_tree(number, tree, features) for number, tree in enumerate(trees)],
        },
        "name": "gbtree",
    }
    parameters = {"base_score": "0E0", "boost_from_average": "0", "num_class": "0", "num_target": "1", "num_feature": str(features)}
    objective = {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}}
    learner = {
        "attributes": {},
        "feature_names": [],
        "feature_types": [],
        "gradient_booster": booster,
        "learner_model_param": parameters,
        "objective": objective,
    }
    return {"learner": learner, "version": [2, 1, 1]}


def _tree(number: int, tree: _Tree, features: int) -> dict[str, object]:
    nodes = len(tree.left_children)
    unused = [0.0] * nodes  # what training keeps of nodes, and predictions do not look at
    return {
        "base_weights": unused,
        "categories": [],
        "categories_nodes": [],
        "categories_segments": [],
        "categories_sizes": [],
        "default_left": tree.default_left,
        "id": number,
        "left_children": tree.left_children,
        "loss_changes": unused,
        "parents": _parents(np.array(tree.left_children), np.array(tree.right_children)).tolist(),
        "right_children": tree.right_children,
        "split_conditions": tree.split_conditions,
        "split_indices": tree.split_indices,
        "split_type": [0] * nodes,
        "sum_hessian": unused,
        "tree_param": {"num_deleted": "0", "num_feature": str(features), "num_nodes": str(nodes), "size_leaf_vector": "1"},
    }


def _parents(left: Ints, right: Ints) -> Ints:
    """Of each node."""
    found = np.full(len(left), _NO_PARENT)
    inner = np.flatnonzero(left >= 0)
    found[left[inner]] = found[right[inner]] = inner
    return found
