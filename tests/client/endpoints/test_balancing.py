"""The order of endpoints for each strategy; test_distribution.py has what real requests get."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.client.endpoints.balancing import Balancer, EndpointView
from gpu_worker_pool.config import STRATEGIES

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def endpoint(
    endpoint_id: str, total: int = 8, available: int | None = None, *, is_healthy: bool = True
) -> EndpointView:
    return EndpointView(endpoint_id, is_healthy, total, total if available is None else available)


def served(balancer: Balancer, views: Iterable[EndpointView], calls: int = 1000) -> Counter[str]:
    views = list(views)
    return Counter(balancer.order(views)[0] for _ in range(calls))


@every_strategy
def test_equal_endpoints_take_turns_and_unhealthy_ones_have_none(name: str) -> None:
    balancer = Balancer(name)
    assert balancer.order([]) == balancer.order([endpoint("x", is_healthy=False)]) == []
    shares = served(balancer, [*map(endpoint, "abcdefg"), endpoint("x", is_healthy=False)])
    assert sorted(shares) == list("abcdefg")
    assert max(shares.values()) - min(shares.values()) <= 1


@pytest.mark.parametrize(
    ("name", "views", "firsts"),
    [
        ("round_robin", [endpoint("c"), endpoint("a"), endpoint("b")], "abcabc"),
        ("round_robin", [endpoint("a", 100), endpoint("b", 1, 0)], "abab"),
        ("weighted", [endpoint("a", 5), endpoint("b", 1), endpoint("c", 1)], "aabacaaaabacaa"),
        ("weighted", [endpoint("a", 6, 0), endpoint("b", 2, 2)], "aabaaaba"),
        ("weighted", [endpoint("a", 0), endpoint("b", 0)], "abab"),
        ("availability", [endpoint("a", 8, 4), endpoint("b", 8, 4), endpoint("c", 8, 3)], "abab"),
    ],
)
def test_whose_turn_it_is(name: str, views: list[EndpointView], firsts: str) -> None:
    balancer = Balancer(name)
    assert "".join(balancer.order(views)[0] for _ in firsts) == firsts


@pytest.mark.parametrize(
    ("name", "views", "order"),
    [
        ("round_robin", [endpoint("a"), endpoint("b"), endpoint("c")], "abc"),
        ("weighted", [endpoint("a", 0), endpoint("b", 1), endpoint("c", 100)], "cba"),
        ("availability", [endpoint("a", 8, 4), endpoint("b", 2, 2), endpoint("c", 100, 99)], "bca"),
        ("availability", [endpoint("a", 2, 1), endpoint("b", 8, 4), endpoint("c", 6, 3)], "bca"),
        ("availability", [endpoint("a", 8, 0), endpoint("b", 0, 0), endpoint("c", 100, 1)], "cab"),
    ],
)
def test_what_is_tried_first(name: str, views: list[EndpointView], order: str) -> None:
    assert "".join(Balancer(name).order(views)) == order


@given(st.lists(st.sets(st.sampled_from("cdefg")), max_size=200))
def test_round_robin_gives_each_a_fair_share_of_the_requests_it_was_there_for(fleets: list[set[str]]) -> None:
    balancer = Balancer("round_robin")
    served_first: Counter[str] = Counter()
    fair: dict[str, float] = dict.fromkeys("cdefg", 0.0)
    for healthy in filter(None, fleets):
        served_first[balancer.order([endpoint(id_, is_healthy=id_ in healthy) for id_ in "cdefg"])[0]] += 1
        for id_ in healthy:
            fair[id_] += 1 / len(healthy)
        assert all(abs(served_first[id_] - fair[id_]) <= 2 for id_ in fair)


@pytest.mark.parametrize("is_known", [True, False], ids=["away", "removed"])
def test_weighted_keeps_its_proportions_while_another_endpoint_comes_and_goes(is_known: bool) -> None:
    balancer = Balancer("weighted")
    shares: Counter[str] = Counter()
    for call in range(9000):
        is_there = call % 2 == 0
        others = [endpoint("c", 8, is_healthy=is_there)] if is_known or is_there else []
        shares[balancer.order([endpoint("a", 8), endpoint("b", 1), *others])[0]] += 1
    assert shares["b"] > 500
    assert abs(shares["a"] - 8 * shares["b"]) <= 16


def test_availability_follows_the_current_figures_and_is_even_among_the_best() -> None:
    balancer = Balancer("availability")
    shares: Counter[str] = Counter()
    for call in range(1200):
        lead = 8 if call % 2 else 4
        views = [endpoint("a", 8, 4), endpoint("b", 8, 4), endpoint("c", 8, lead)]
        shares[balancer.order(views)[0]] += 1
    assert shares == {"a": 200, "b": 200, "c": 800}


@every_strategy
def test_one_that_returns_gets_no_burst_and_one_that_is_gone_is_forgotten(name: str) -> None:
    balancer = Balancer(name)
    everyone = [endpoint(id_) for id_ in "abcd"]
    # d leaves at the moment it is owed the most, and is away for long.
    assert served(balancer, everyone, calls=3) == {"a": 1, "b": 1, "c": 1}
    served(balancer, [*everyone[:3], endpoint("d", is_healthy=False)], calls=1000)
    firsts = "".join(balancer.order(everyone)[0] for _ in range(12))
    assert firsts.count("d") <= 4
    assert "dd" not in firsts
    for number in range(1000):
        balancer.order([endpoint(f"gone{number}"), endpoint("a")])
    assert balancer.order([endpoint("a")]) == ["a"]
    assert "gone" not in repr(balancer)
