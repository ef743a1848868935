"""Optuna's trials in parallel, each on a lease of its own, as docs/ADAPTERS.md says; where Optuna is installed."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool import GPUExecutor
from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import active

from .work import loss_of

optuna: Any = pytest.importorskip("optuna", reason="optuna is not installed")


def test_trials_train_on_leased_gpus(server: ServerProcess) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with GPUExecutor(max_workers=2) as ex:

        def objective(trial: Any) -> float:
            return ex.submit(loss_of, trial.suggest_float("rate", 0, 1)).result()

        study = optuna.create_study()
        study.optimize(objective, n_trials=8, n_jobs=2)

    assert len(study.trials) == 8
    assert study.best_value == min(trial.value for trial in study.trials)
    assert active(server) == set()
