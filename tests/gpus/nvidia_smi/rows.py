"""A row as `nvidia-smi` prints it."""

from __future__ import annotations

A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abc")
ROW_A = f"0, {A}, NVIDIA GeForce RTX 3080, 10240, 2048, 15, 45, 120.50, 320.00\n"
PATIENCE_S = 30.0
