from dataclasses import dataclass

from expertctl.http.limits import RateLimiter


@dataclass
class RateClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_what_it_holds_then_tells_how_long_to_wait() -> None:
    rates = RateLimiter(3, RateClock())
    assert [rates.take("a") for _ in range(5)] == [0, 0, 0, 20, 20]


def test_a_bucket_fills_again_evenly_and_never_beyond() -> None:
    clock = RateClock()
    rates = RateLimiter(60, clock)
    for _ in range(60):
        assert rates.take("a") == 0
    assert rates.take("a") == 1
    clock.now += 2
    assert [rates.take("a") for _ in range(3)] == [0, 0, 1]
    clock.now += 10_000
    assert [rates.take("a") for _ in range(61)] == [0] * 60 + [1]


def test_what_is_refused_does_not_make_the_wait_longer() -> None:
    clock = RateClock()
    rates = RateLimiter(1, clock)
    rates.take("a")
    assert {rates.take("a") for _ in range(100)} == {60}
    clock.now += 60
    assert rates.take("a") == 0


def test_looking_takes_nothing() -> None:
    rates = RateLimiter(1, RateClock())
    assert [rates.get_wait("a") for _ in range(3)] == [0, 0, 0]
    rates.take("a")
    assert rates.get_wait("a") == 60


def test_keys_have_buckets_of_their_own() -> None:
    rates = RateLimiter(1, RateClock())
    assert [rates.take(key) for key in "abab"] == [0, 0, 60, 60]


def test_a_limit_of_nothing_gives_nothing() -> None:
    rates = RateLimiter(0, RateClock())
    assert rates.take("a") == 60
    assert rates.get_wait("a") == 60


def test_attack_80_a_flood_of_keys_takes_bounded_memory() -> None:
    """And who has used up a bucket does not get a new one as long as it keeps asking."""
    rates = RateLimiter(1, RateClock(), max_keys=100)
    for number in range(10_000):
        rates.take(str(number))
    assert len(rates) == 100
    assert rates.take("9999") == 60
    assert rates.take("0") == 0


def test_what_was_spent_beyond_the_bucket_is_waited_for() -> None:
    clock = RateClock()
    rates = RateLimiter(60, clock)
    rates.spend("a", 90)
    assert rates.get_wait("a") == 31
    clock.now += 31
    assert rates.take("a") == 0


def test_spending_takes_bounded_memory_too() -> None:
    rates = RateLimiter(1, RateClock(), max_keys=10)
    for number in range(100):
        rates.spend(str(number), 5)
    assert len(rates) == 10
