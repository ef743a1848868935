"""Guesses of tokens are slowed by address; a right token is not locked out by them."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import ExitStack

from gpu_worker_pool.server.http.tokens import FREE_GUESSES, MOST_ADDRESSES, MOST_GUESSES, MOST_HELD_S, Guesses
from gpu_worker_pool.testing import Answer, ServerProcess
from tests.server.leasing import new_id, put

ADA, BOB = "the-secret-token-of-ada", "the-secret-token-of-bob"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_flood_of_guesses_is_not_checked_and_costs_no_other_caller_its_token() -> None:
    with ServerProcess({"GPU_POOL_TOKENS": f"ada:{ADA} bob:{BOB}"}) as server:
        assert put(server, new_id(), headers=bearer(ADA)).status == 201
        with ExitStack() as stack:
            guessers = []
            for number in range(2 * MOST_GUESSES):
                guesser = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                head = f"PUT /leases/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nAuthorization: Bearer a-guess-{number:09}"
                guesser.sendall(f"{head}\r\n\r\n{{}}".encode())
                guessers.append(guesser)
            answers = [guesser.recv(65536).decode() for guesser in guessers]

            unchecked = [answer for answer in answers if " 429 " in answer.partition("\r\n")[0]]
            assert {answer.partition("\r\n")[0].split()[1] for answer in answers} == {"401", "429"}
            assert "retry-after: " in unchecked[0].lower()
            assert "was not checked" in json.loads(unchecked[0].rpartition("\r\n")[2])["detail"]
            assert put(server, new_id(), headers=bearer(ADA)).status == 201, "it was right from here before"
            assert from_another_address(server, BOB).status == 201


def from_another_address(server: ServerProcess, token: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30, source_address=("127.0.0.2", 0))
    connection.request("PUT", f"/leases/{new_id()}", "{}", bearer(token))
    try:
        return Answer.read(connection)
    finally:
        connection.close()


def test_the_first_guesses_are_answered_at_once_and_the_next_ones_ever_later() -> None:
    guesses = Guesses(Clock())
    held = [guesses.note_wrong("10.0.0.7", f"{number}") for number in range(MOST_GUESSES)]

    assert set(held[:FREE_GUESSES]) == {0.0}
    assert held == sorted(held)
    assert (held[FREE_GUESSES] > 0.0, held[-1]) == (True, MOST_HELD_S)
    assert guesses.must_wait_s("10.0.0.7", "right") is not None
    assert guesses.must_wait_s("10.0.0.8", "right") is None


def test_a_caller_that_repeats_a_token_does_not_guess() -> None:
    guesses = Guesses(Clock())
    assert {guesses.note_wrong("10.0.0.7", "revoked") for _ in range(10 * MOST_GUESSES)} == {0.0}
    assert guesses.must_wait_s("10.0.0.7", "right") is None


def test_an_ipv6_network_counts_as_one_address_and_memory_is_bounded() -> None:
    guesses = Guesses(Clock())
    for number in range(MOST_GUESSES):
        guesses.note_wrong(f"2001:db8::{number:x}", f"{number}")
    assert guesses.must_wait_s("2001:db8::ffff", "new") is not None
    assert guesses.must_wait_s("::ffff:10.0.0.7", "new") is None
    for number in range(2 * MOST_ADDRESSES):
        guesses.note_wrong(f"10.0.{number // 256}.{number % 256}", "x")
    assert len(guesses) == MOST_ADDRESSES
