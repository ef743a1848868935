"""GLOSSARY.md has every state and every reason that a user is shown, once and in order."""

from __future__ import annotations

import re
from typing import get_args

from gpu_worker_pool.core.model.lease import EndReason
from gpu_worker_pool.wire.leases import LeaseState
from gpu_worker_pool.wire.pool import GpuState
from tests.documents.test_facts import code_in, document

ROLES = {"leader", "follower", "agent", "candidate"}


def terms() -> list[str]:
    return re.findall(r"^\| \*\*([^*]+)\*\* \|", document("GLOSSARY.md"), re.MULTILINE)


def test_the_terms_are_in_order_and_none_is_there_twice() -> None:
    assert terms() == sorted(set(terms()), key=str.lower)


def test_what_a_user_is_shown_is_explained() -> None:
    shown = {state.replace("_", " ") for state in (*get_args(GpuState), *get_args(LeaseState))}
    assert shown | ROLES <= set(terms())
    assert {str(reason) for reason in EndReason} <= set(code_in(document("GLOSSARY.md")))
