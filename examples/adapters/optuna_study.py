"""An Optuna study with trials in parallel, each of which trains on a GPU of its own."""

from __future__ import annotations

import os
from typing import Any

import optuna

from gpu_worker_pool import GPUExecutor


def train(rate: float) -> float:
    """Stand for your training."""
    assert os.environ["CUDA_VISIBLE_DEVICES"]
    return (rate - 0.3) ** 2


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with GPUExecutor(max_workers=2) as ex:

        def objective(trial: Any) -> float:
            """Suggest here, where the study is; train there, where the GPU is."""
            return ex.submit(train, trial.suggest_float("rate", 0, 1)).result()

        study = optuna.create_study()
        study.optimize(objective, n_trials=8, n_jobs=2)
    print(f"{len(study.trials)} trials; the best rate is {study.best_params['rate']:.2f}")
