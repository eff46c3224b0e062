"""Draws random convex connected subgraphs of a training step: the clusters that are then measured.

Runs inside the measuring process (standard library only, Python 3.8 and later). Sets of nodes are integers used as bit masks, which
makes the convex hull of a set two unions and an intersection.
"""

import math


class StepDag:
    """A step's graph, for drawing.

    Parameters
    ----------
    predecessors : list of lists of int
        For each node, in topological order, the nodes that it needs (data and control).
    neighbours : list of sets of int
        For each node, the eligible nodes that share a tensor with it.
    eligible : list of bool
        Nodes that a cluster may hold.
    heavy : list of bool
        Nodes that clusters of light ops leave out: convolutions, matrix products.
    """

    def __init__(self, predecessors, neighbours, eligible, heavy):
        self.neighbours = neighbours
        self.eligible = _mask(i for i, able in enumerate(eligible) if able)
        self.light = self.eligible & ~_mask(i for i, is_heavy in enumerate(heavy) if is_heavy)
        self.before = [0] * len(predecessors)
        for node, sources in enumerate(predecessors):
            for source in sources:
                self.before[node] |= self.before[source] | 1 << source
        self.after = [0] * len(predecessors)
        for node in range(len(predecessors) - 1, -1, -1):
            for source in predecessors[node]:
                self.after[source] |= self.after[node] | 1 << node

    def hull(self, members):
        """The smallest convex set that holds a set: with the nodes on all paths between its nodes."""
        before = after = 0
        for node in _nodes(members):
            before |= self.before[node]
            after |= self.after[node]
        return members | before & after

    def draw(self, random, largest):
        """Nodes of a random cluster of 2 to `largest`, sorted; None where the drawn place has none.

        Sizes are spread evenly over their logarithm. Half of the clusters hold light ops only, as clusters that pay often do.
        """
        allowed = self.light if random.random() < 0.5 else self.eligible
        target = min(largest, round(2 * math.exp(random.random() * math.log(largest / 2))))
        candidates = _nodes(allowed)
        if not candidates:
            return None
        first = random.choice(candidates)
        members = 1 << first
        frontier = sorted(n for n in self.neighbours[first] if allowed >> n & 1)
        count = 1
        while frontier and count < target:
            node = frontier.pop(random.randrange(len(frontier)))
            grown = self.hull(members | 1 << node)
            if grown & ~allowed or bin(grown).count("1") > largest:
                continue
            added = _nodes(grown & ~members)
            members, count = grown, count + len(added)
            outside = set(frontier)
            for new in added:
                outside.update(n for n in self.neighbours[new] if allowed >> n & 1)
            frontier = sorted(n for n in outside if not members >> n & 1)
        return _nodes(members) if count > 1 else None


def _mask(nodes):
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


def _nodes(mask):
    """Members of a mask, sorted."""
    digits = bin(mask)[:1:-1]
    nodes, at = [], digits.find("1")
    while at >= 0:
        nodes.append(at)
        at = digits.find("1", at + 1)
    return nodes
