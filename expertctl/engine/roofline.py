"""What reading a text costs at least: bytes from memory, arithmetic; and the roof over both.

Weights are counted once for each pass over them, keys and values as often as a token needs them
together. Of routed experts a pass reads as many as one token uses, and may read more. A product and
its addition are two operations.
"""

from dataclasses import dataclass

from expertctl.engine.packed_delta import is_routed
from expertctl.package.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a pass reads and computes."""

    weight_bytes: int
    expert_bytes: int
    kv_bytes: int
    operations: int

    @property
    def nbytes(self) -> int:
        """All bytes that it reads."""
        return self.weight_bytes + self.expert_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations for each byte: few leave arithmetic idle, many leave memory idle."""
        return self.operations / self.nbytes


@dataclass(frozen=True, slots=True)
class Roof:
    """What a machine does in a second at most."""

    nbytes: float
    operations: float

    def at(self, intensity: float) -> float:
        """Return the operations in a second that work of some intensity can reach."""
        return min(self.operations, intensity * self.nbytes)

    @property
    def ridge(self) -> float:
        """The intensity from which on arithmetic is the limit."""
        return self.operations / self.nbytes

    def seconds(self, work: Work) -> float:
        """Return the least time that work takes."""
        return work.operations / self.at(work.intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A base in memory, and a plan on it: what each pass over them takes."""

    config: ModelConfig
    layer_bytes: int
    """All matrices but embedding, head and those of routed experts."""
    head_bytes: int
    kv_itemsize: int
    routed_bytes: int = 0
    """The matrices of one routed expert."""
    expert_bytes: int = 0
    """What is read of the plan."""
    expert_numbers: int = 0
    """Numbers of its matrices; each is multiplied once for a token."""

    def token(self, context: int) -> Work:
        """Return what one token behind so many others takes."""
        return Work(
            weight_bytes=self._pass_bytes + self.head_bytes,
            expert_bytes=self.expert_bytes,
            kv_bytes=self._kv_bytes(context + 1),
            operations=2 * (self._layer_numbers + self._head_numbers + self.expert_numbers)
            + self._attention(context + 1),
        )

    def prompt(self, tokens: int, *, chunk: int) -> Work:
        """Return what a prompt takes that is read so many tokens at a time; its end is scored."""
        passes = -(-tokens // chunk)
        ends = [min((number + 1) * chunk, tokens) for number in range(passes)]
        return Work(
            weight_bytes=passes * self._pass_bytes + self.head_bytes,
            expert_bytes=passes * self.expert_bytes,
            kv_bytes=sum(map(self._kv_bytes, ends)),
            operations=2 * tokens * (self._layer_numbers + self.expert_numbers)
            + 2 * self._head_numbers
            + sum(self._attention(seen) for seen in range(1, tokens + 1)),
        )

    @property
    def numbers(self) -> int:
        """The weights that a token is multiplied with."""
        return self._layer_numbers + self._head_numbers

    @property
    def _head_numbers(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def _layer_numbers(self) -> int:
        shapes = self.config.linear_shapes().items()
        common = sum(rows * columns for name, (rows, columns) in shapes if not is_routed(name))
        return common - self._head_numbers + self._routed_numbers

    @property
    def _routed_numbers(self) -> int:
        """Return those of all routers, and of the experts that a token uses."""
        experts, hidden = self.config.experts, self.config.hidden_size
        if experts is None:
            return 0
        routers = len(experts.layers) * experts.count * hidden
        return routers + self._chosen * 3 * hidden * experts.intermediate_size

    @property
    def _chosen(self) -> int:
        """How many experts of all layers a token is routed to."""
        experts = self.config.experts
        return 0 if experts is None else len(experts.layers) * experts.used

    @property
    def _pass_bytes(self) -> int:
        return self.layer_bytes + self._chosen * self.routed_bytes

    def _kv_bytes(self, seen: int) -> int:
        """Return the bytes of the keys and values that all layers look at together."""
        one = self.config.kv_bytes(1, itemsize=self.kv_itemsize) // self.config.layers
        return one * sum(self._seen(seen))

    def _attention(self, seen: int) -> int:
        """Return what scores and sums of one token take in all layers."""
        return 4 * self.config.heads * self.config.head_dim * sum(self._seen(seen))

    def _seen(self, seen: int) -> list[int]:
        return [min(seen, window or seen) for window in self.config.windows]
