from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.client.endpoints.balancing import Balancer, EndpointView
from gpu_worker_pool.config import STRATEGIES

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def endpoint(
    endpoint_id: str,
    total: int = 8,
    available: int | None = None,
    *,
    is_healthy: bool = True,
) -> EndpointView:
    return EndpointView(endpoint_id, is_healthy, total, total if available is None else available)


def served(balancer: Balancer, views: Iterable[EndpointView], calls: int = 1000) -> Counter[str]:
    views = list(views)
    return Counter(balancer.order(views)[0] for _ in range(calls))


def test_the_strategies_are_those_of_the_documents() -> None:
    assert STRATEGIES == ("availability", "round_robin", "weighted")


@every_strategy
def test_a_balancer_knows_its_name(name: str) -> None:
    assert Balancer(name).name == name


def test_an_unknown_strategy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="one of availability, round_robin, weighted, not 'random'"):
        Balancer("random")


@every_strategy
def test_without_a_healthy_endpoint_there_is_nothing_to_try(name: str) -> None:
    balancer = Balancer(name)

    assert balancer.order([]) == []
    assert balancer.order([endpoint("a", is_healthy=False)]) == []


@every_strategy
def test_unhealthy_endpoints_are_left_out(name: str) -> None:
    views = [endpoint("a"), endpoint("b", is_healthy=False), endpoint("c")]

    assert sorted(Balancer(name).order(views)) == ["a", "c"]


@every_strategy
def test_equal_endpoints_get_equal_shares(name: str) -> None:
    shares = served(Balancer(name), [endpoint(id_) for id_ in "abcdefg"])

    assert sorted(shares) == list("abcdefg")
    assert max(shares.values()) - min(shares.values()) <= 1


@every_strategy
def test_a_repr_shows_the_strategy_and_who_is_owed_what(name: str) -> None:
    balancer = Balancer(name)
    balancer.order([endpoint("a"), endpoint("b")])

    assert repr(balancer) == f"<Balancer {name}: a -0.50, b +0.50>"


# --- round robin ---------------------------------------------------------------------------------------------------


def test_round_robin_goes_round_and_lists_the_next_ones_in_turn() -> None:
    balancer = Balancer("round_robin")
    views = [endpoint("c"), endpoint("a"), endpoint("b")]

    assert [balancer.order(views) for _ in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_round_robin_keeps_its_order_over_many_rounds() -> None:
    balancer = Balancer("round_robin")
    views = [endpoint(id_) for id_ in "abcdefg"]

    firsts = "".join(balancer.order(views)[0] for _ in range(14_000))

    assert firsts == "abcdefg" * 2_000


def test_round_robin_ignores_capacity_and_availability() -> None:
    assert served(Balancer("round_robin"), [endpoint("a", 100), endpoint("b", 1, 0)]) == {
        "a": 500,
        "b": 500,
    }


@pytest.mark.parametrize("dead", ["a", "b", "c"])
def test_round_robin_goes_on_in_turn_when_an_endpoint_dies(dead: str) -> None:
    balancer = Balancer("round_robin")
    balancer.order([endpoint("a"), endpoint("b"), endpoint("c")])
    survivors = [endpoint(id_) for id_ in "abc" if id_ != dead]

    firsts = [balancer.order(survivors)[0] for _ in range(4)]

    # "a" has been served, so it comes after whoever has not.
    assert "".join(firsts) == {"a": "bcbc", "b": "caca", "c": "baba"}[dead]


fleets_coming_and_going = st.lists(st.sets(st.sampled_from("cdefg")), max_size=200)


@given(fleets_coming_and_going)
def test_round_robin_treats_two_endpoints_alike_however_others_come_and_go(others: list[set[str]]) -> None:
    balancer = Balancer("round_robin")
    shares: Counter[str] = Counter()
    for healthy in others:
        views = [endpoint(id_, is_healthy=id_ in "ab" or id_ in healthy) for id_ in "abcdefg"]
        shares[balancer.order(views)[0]] += 1

        assert abs(shares["a"] - shares["b"]) <= 1


@given(fleets_coming_and_going)
def test_round_robin_gives_everyone_a_fair_share_of_the_requests_it_was_there_for(
    fleets: list[set[str]],
) -> None:
    balancer = Balancer("round_robin")
    served_first: Counter[str] = Counter()
    fair: dict[str, float] = dict.fromkeys("cdefg", 0.0)
    for healthy in filter(None, fleets):
        served_first[balancer.order([endpoint(id_, is_healthy=id_ in healthy) for id_ in "cdefg"])[0]] += 1
        for id_ in healthy:
            fair[id_] += 1 / len(healthy)

        assert all(abs(served_first[id_] - fair[id_]) <= 2 for id_ in fair)


def test_round_robin_favours_nobody_while_another_endpoint_flaps() -> None:
    balancer = Balancer("round_robin")
    firsts = [
        balancer.order([endpoint("a"), endpoint("b"), endpoint("c", is_healthy=call % 2 == 0)])[0]
        for call in range(1000)
    ]

    shares = Counter(firsts)
    assert abs(shares["a"] - shares["b"]) <= 1
    assert abs(shares["c"] - 500 / 3) <= 1  # a third of the 500 calls it was there for


# --- weighted ------------------------------------------------------------------------------------------------------


def test_weighted_serves_in_proportion_to_capacity() -> None:
    views = [endpoint("a", 8), endpoint("b", 4), endpoint("c", 2), endpoint("d", 1)]

    shares = served(Balancer("weighted"), views)

    for id_, weight in {"a": 8, "b": 4, "c": 2, "d": 1}.items():
        assert abs(shares[id_] - 1000 * weight / 15) <= 1


def test_weighted_is_smooth_as_in_nginx() -> None:
    balancer = Balancer("weighted")
    views = [endpoint("a", 5), endpoint("b", 1), endpoint("c", 1)]

    firsts = "".join(balancer.order(views)[0] for _ in range(14))

    assert firsts == "aabacaa" * 2


def test_weighted_ignores_availability() -> None:
    assert served(Balancer("weighted"), [endpoint("a", 6, 0), endpoint("b", 2, 2)]) == {
        "a": 750,
        "b": 250,
    }


def test_weighted_lists_an_endpoint_without_gpus_last() -> None:
    balancer = Balancer("weighted")
    views = [endpoint("a", 0), endpoint("b", 1), endpoint("c", 100)]

    orders = [balancer.order(views) for _ in range(1000)]

    assert all(order[-1] == "a" for order in orders)


def test_weighted_rotates_evenly_if_no_endpoint_has_gpus() -> None:
    assert served(Balancer("weighted"), [endpoint("a", 0), endpoint("b", 0)]) == {"a": 500, "b": 500}


def test_weighted_keeps_its_proportions_while_another_endpoint_flaps() -> None:
    balancer = Balancer("weighted")
    shares: Counter[str] = Counter()
    for call in range(9000):
        views = [endpoint("a", 8), endpoint("b", 1), endpoint("c", 8, is_healthy=call % 2 == 0)]
        shares[balancer.order(views)[0]] += 1

    assert shares["b"] > 500
    assert abs(shares["a"] - 8 * shares["b"]) <= 16


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.integers(1, 300))
def test_weighted_is_never_far_from_the_fair_share(capacities: list[int], calls: int) -> None:
    views = [endpoint(f"server{number}", capacity) for number, capacity in enumerate(capacities)]

    shares = served(Balancer("weighted"), views, calls)

    for view in views:
        assert abs(shares[view.endpoint_id] - calls * view.total_gpus / sum(capacities)) <= 2


# --- availability --------------------------------------------------------------------------------------------------


def test_availability_puts_the_highest_percentage_first() -> None:
    views = [endpoint("a", 8, 4), endpoint("b", 2, 2), endpoint("c", 100, 99)]

    assert Balancer("availability").order(views) == ["b", "c", "a"]


def test_availability_puts_more_gpus_first_where_percentages_are_equal() -> None:
    views = [endpoint("a", 2, 1), endpoint("b", 8, 4), endpoint("c", 6, 3)]

    assert Balancer("availability").order(views) == ["b", "c", "a"]


def test_availability_lists_full_endpoints_and_those_without_gpus_last() -> None:
    views = [endpoint("a", 8, 0), endpoint("b", 0, 0), endpoint("c", 100, 1)]

    order = Balancer("availability").order(views)

    assert order[0] == "c"
    assert sorted(order) == ["a", "b", "c"]


def test_availability_always_follows_the_current_figures() -> None:
    balancer = Balancer("availability")
    served(balancer, [endpoint("a", 8, 8), endpoint("b", 8, 2)], calls=100)

    assert served(balancer, [endpoint("a", 8, 1), endpoint("b", 8, 2)], calls=100) == {"b": 100}


def test_availability_rotates_among_the_best_only() -> None:
    views = [endpoint("a", 8, 4), endpoint("b", 8, 4), endpoint("c", 8, 3)]

    assert served(Balancer("availability"), views) == {"a": 500, "b": 500}


def test_availability_rotates_evenly_even_if_others_take_the_lead_in_between() -> None:
    balancer = Balancer("availability")
    shares: Counter[str] = Counter()
    for call in range(1200):
        lead = 8 if call % 2 else 4
        views = [endpoint("a", 8, 4), endpoint("b", 8, 4), endpoint("c", 8, lead)]
        shares[balancer.order(views)[0]] += 1

    assert shares == {"a": 200, "b": 200, "c": 800}


# --- recovery ------------------------------------------------------------------------------------------------------


@every_strategy
def test_a_returning_endpoint_gets_no_burst(name: str) -> None:
    balancer = Balancer(name)
    everyone = [endpoint(id_) for id_ in "abcd"]
    # d leaves at the moment it is owed the most, and is away for long.
    assert served(balancer, everyone, calls=3) == {"a": 1, "b": 1, "c": 1}
    served(balancer, [*everyone[:3], endpoint("d", is_healthy=False)], calls=1000)

    firsts = "".join(balancer.order(everyone)[0] for _ in range(12))

    assert firsts.count("d") <= 4
    assert "dd" not in firsts


@every_strategy
def test_an_endpoint_that_is_no_longer_there_is_forgotten(name: str) -> None:
    balancer = Balancer(name)
    for number in range(1000):
        balancer.order([endpoint(f"gone{number}"), endpoint("a")])

    assert balancer.order([endpoint("a")]) == ["a"]
    assert "gone" not in repr(balancer)


@every_strategy
def test_an_endpoint_that_is_added_later_gets_its_share_from_then_on(name: str) -> None:
    balancer = Balancer(name)
    served(balancer, [endpoint("a"), endpoint("b")])

    shares = served(balancer, [endpoint("a"), endpoint("b"), endpoint("c")], calls=999)

    assert all(abs(share - 333) <= 1 for share in shares.values())


def test_weighted_keeps_its_proportions_while_another_endpoint_is_added_and_removed() -> None:
    balancer = Balancer("weighted")
    shares: Counter[str] = Counter()
    for call in range(9000):
        others = [endpoint("c", 8)] if call % 2 else []
        shares[balancer.order([endpoint("a", 8), endpoint("b", 1), *others])[0]] += 1

    assert shares["b"] > 500
    assert abs(shares["a"] - 8 * shares["b"]) <= 16


# --- properties ----------------------------------------------------------------------------------------------------

views_of_a_fleet = st.lists(
    st.builds(
        EndpointView,
        st.sampled_from("abcdefgh"),
        st.booleans(),
        st.integers(0, 16),
        st.integers(0, 16),
    ),
    unique_by=lambda view: view.endpoint_id,
)
histories = st.lists(views_of_a_fleet, max_size=30)
names = st.sampled_from(STRATEGIES)


@given(names, histories)
def test_the_order_is_always_a_permutation_of_the_healthy_endpoints(
    name: str, history: list[list[EndpointView]]
) -> None:
    balancer = Balancer(name)
    for views in history:
        assert sorted(balancer.order(views)) == sorted(v.endpoint_id for v in views if v.is_healthy)


@given(names, histories, st.randoms(use_true_random=False))
def test_the_order_of_the_views_does_not_matter(name: str, history: list[list[EndpointView]], random: Random) -> None:
    first, second = Balancer(name), Balancer(name)
    for views in history:
        shuffled = list(views)
        random.shuffle(shuffled)
        assert first.order(views) == second.order(shuffled)


@given(histories)
def test_availability_never_puts_a_full_endpoint_before_a_free_one(
    history: list[list[EndpointView]],
) -> None:
    balancer = Balancer("availability")
    for views in history:
        is_free = {view.endpoint_id: view.available_gpus > 0 < view.total_gpus for view in views}
        flags = [is_free[id_] for id_ in balancer.order(views)]
        assert flags == sorted(flags, reverse=True)
