"""Which part of the global work is this rank's. Nothing is generated twice, nothing is trained twice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's place among the generator groups.

    The ranks of one generator group (tensor parallelism) must submit equal requests; each of them then keeps
    its own part of the results to score and train on.

    Attributes:
        generator_index: Index of this rank's generator group.
        num_generators: Number of generator groups.
        member_index: Index of this rank in its group.
        group_degree: Ranks per generator group.
    """

    generator_index: int
    num_generators: int
    member_index: int = 0
    group_degree: int = 1

    @classmethod
    def of_rank(cls, rank: int, world_size: int, group_degree: int) -> Share:
        """Generator groups are consecutive ranks.

        >>> Share.of_rank(3, 4, 2)
        Share(generator_index=1, num_generators=2, member_index=1, group_degree=2)
        """
        return cls(rank // group_degree, world_size // group_degree, rank % group_degree, group_degree)

    def to_generate(self, count: int) -> range:
        """Indices in [0, count) that this rank's generator group generates.

        >>> list(Share(1, 2).to_generate(5))
        [1, 3]
        """
        return range(self.generator_index, count, self.num_generators)

    def to_keep_among_generated(self, count: int) -> range:
        """Positions to keep in the list of what this rank's generator group generated, of that length.

        >>> [list(Share.of_rank(r, 2, 2).to_keep_among_generated(3)) for r in range(2)]
        [[0, 2], [1]]
        """
        return range(self.member_index, count, self.group_degree)
