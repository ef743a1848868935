"""Groups, as the commands show them."""

from __future__ import annotations

from gpu_worker_pool.wire.plans import GroupView


def describe_group(group: GroupView) -> str:
    """`alice, bob; at most 8 GPUs together; first on box1:4-7`."""
    parts = [
        ", ".join(group.members),
        None if group.quota is None else f"at most {group.quota} GPUs together",
        f"first on {first_on(group)}, which others may use until they ask" if group.first_right else None,
    ]
    return "; ".join(part for part in parts if part)


def first_on(group: GroupView) -> str:
    """`box1:4-7, box2:0`: indices that follow each other are a span."""
    by_node: dict[str, list[int]] = {}
    for gpu in group.first_right:
        by_node.setdefault(gpu.node or "?", []).append(-1 if gpu.gpu_id is None else gpu.gpu_id)
    found = []
    for node, indices in sorted(by_node.items()):
        spans: list[list[int]] = []
        for index in sorted(indices):
            if spans and index == spans[-1][-1] + 1:
                spans[-1].append(index)
            else:
                spans.append([index])
        found += [f"{node}:{span[0]}" + (f"-{span[-1]}" if len(span) > 1 else "") for span in spans]
    return ", ".join(found) or "-"
