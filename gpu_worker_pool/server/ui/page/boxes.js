// The boxes that the page shows: those of this server's fleet, or this server alone.

const inOrder = new Intl.Collator("en", { numeric: true });

/**
 * Split this server's pool by node. `told` is what the leader knows of each box of a fleet; null on one box. The own box
 * has the key "". A box that does not answer is unknown, and so are its GPUs; its leases go on. `oddVersion` is that of a box
 * with another version than the leader's.
 */
export function boxesOf(own, told) {
  const { pool } = own;
  const home = pool.node;
  const byNode = new Map(told === null ? [[home, []]] : told.map((box) => [box.node, []]));
  for (const gpu of pool.gpus) {
    const node = gpu.node ?? home;
    if (!byNode.has(node)) byNode.set(node, []);
    byNode.get(node).push(gpu);
  }
  const known = new Map((told ?? []).map((box) => [box.node, box]));
  // A node that nobody tells of is one that this box was called before: it belongs to it.
  if (told === null) return [{ ...own, gpus: pool.gpus, isUnknown: false, isLeader: false, oddVersion: null, heardAgoS: null }];
  const leaderVersion = told.find((box) => box.isLeader)?.version ?? null;
  return [...byNode.keys()].sort(inOrder.compare).map((node) => {
    const box = known.get(node);
    const isUnknown = box === undefined || box.state === "unknown";
    const isHome = node === home;
    return {
      ...own,
      key: isHome ? "" : `box ${node}`,
      title: node ?? own.title,
      url: isHome ? null : (box?.url ?? null),
      gpus: isUnknown ? byNode.get(node).map(asUnknown) : byNode.get(node),
      measuredAt: isHome ? own.measuredAt : own.seenAt,
      isUnknown,
      isLeader: box?.isLeader === true,
      oddVersion: isUnknown || leaderVersion === null || box.version === leaderVersion ? null : box.version,
      heardAgoS: box?.heardAgoS ?? null,
    };
  });
}

const asUnknown = (gpu) => (gpu.state === "unknown" ? gpu : { ...gpu, state: "unknown", reason: "its box does not answer; its leases go on" });
