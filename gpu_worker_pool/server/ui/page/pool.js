// Reads the server's answers. The server may have another version than this page, so a value of an unexpected kind counts as unknown.

/** What a state means to a user who wants a GPU. Each GPU is of one kind, so the numbers of all kinds add up. */
export const KIND_OF = {
  free: "free",
  leased: "used",
  shared: "used",
  held: "kept",
  draining: "blocked",
  busy: "blocked",
  outside: "blocked",
  unhealthy: "broken",
  out_of_service: "off",
  unknown: "unknown",
};

/** The kinds in the order in which they are shown, with their words. */
export const KINDS = { free: "free", used: "in use", kept: "kept", blocked: "blocked", broken: "faulty", off: "off", unknown: "unknown" };

/** The word for a state where there is more room than for its kind. */
export const STATE_WORDS = { leased: "in use", held: "kept", out_of_service: "off", unhealthy: "faulty" };

const word = (value) => (typeof value === "string" ? value : null);
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const time = (value) => Date.parse(word(value) ?? "");
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const objects = (value) => (Array.isArray(value) ? value.filter(isObject) : []);
const words = (value) => (Array.isArray(value) ? value.filter((item) => typeof item === "string") : []);

/** What the page is told, once a second; an Error if it is not the answer of a GPU server. */
export function readView(answer) {
  if (!isObject(answer?.pool) || !Array.isArray(answer.pool.gpus) || !Number.isFinite(time(answer.now))) {
    throw new Error("the server's answer cannot be read; reload the page");
  }
  const isInFleet = isObject(answer.pool.fleet);
  const told = isInFleet ? readBoxes(answer.boxes) : null;
  const pool = readPool(answer.pool, told);
  return {
    pool,
    isInFleet,
    boxes: boxesOf(pool, told),
    isFleet: told !== null,
    now: time(answer.now),
    startedAt: time(answer.started_at),
    measuredAt: number(answer.measured_at),
    readingAgeS: number(answer.reading_age_s),
    staleAfterS: number(answer.stale_after_s) ?? Infinity,
    refreshS: number(answer.refresh_interval_s) ?? 1,
    maxHistory: number(answer.max_history) ?? 0,
    advice: word(answer.advice),
    forecast: readForecast(answer.forecast),
    ends: readEnds(answer.ends),
    happened: objects(answer.happened).map(readEvent),
    hasTokens: answer.has_tokens === true,
    title: word(answer.title) ?? "GPU pool",
    docs: word(answer.docs),
    version: word(answer.version) ?? "unknown",
  };
}

function readPool(pool, told) {
  const leases = new Map(objects(pool.leases).map(readLease).map((lease) => [lease.id, lease]));
  const unknown = new Set((told ?? []).filter((box) => box.isUnknown).map((box) => box.node));
  const gpus = objects(pool.gpus).map((gpu, i) => readGpu(gpu, i, leases, unknown));
  const queue = objects(pool.queue).map(readLease);
  return {
    node: word(pool.node),
    source: word(pool.source),
    serverId: word(pool.server_id),
    trouble: word(pool.trouble),
    memoryThreshold: number(pool.thresholds?.memory_percent) ?? 100,
    gpus,
    leases,
    queue,
    reservation: readReservation(pool.reservation),
    bookings: objects(pool.bookings).map(readBooking),
    queueLength: Math.max(number(pool.queue_length) ?? 0, queue.length),
  };
}

function readGpu(gpu, i, leases, unknownNodes) {
  const total_mb = number(gpu.memory_total_mb);
  const used_mb = number(gpu.memory_used_mb);
  const node = word(gpu.node);
  const uuid = word(gpu.uuid) ?? `unknown ${i}`;
  const isSilent = unknownNodes.has(node);
  const state = !isSilent && Object.hasOwn(KIND_OF, gpu.state) ? gpu.state : "unknown";
  return {
    key: `${node ?? ""}:${uuid}`,
    uuid,
    node,
    gpu_id: number(gpu.gpu_id),
    name: word(gpu.name),
    state,
    kind: KIND_OF[state],
    reason: isSilent ? "its box does not answer; its leases go on" : (word(gpu.reason) ?? ""),
    holders: words(gpu.leases).map((id) => leases.get(id)).filter((lease) => lease !== undefined),
    isOutOfService: gpu.is_out_of_service === true,
    total_mb,
    used_mb,
    outside_mb: number(gpu.memory_outside_mb),
    memory_percent: total_mb !== null && total_mb > 0 && used_mb !== null ? (100 * used_mb) / total_mb : null,
    utilization_percent: number(gpu.utilization_percent),
    temperature_c: number(gpu.temperature_c),
    power_draw_w: number(gpu.power_draw_w),
    processes: Array.isArray(gpu.processes) ? objects(gpu.processes).map(readProcess) : null,
  };
}

const readProcess = (process) => ({
  pid: number(process.pid),
  name: word(process.name),
  user: word(process.user),
  used_mb: number(process.used_mb),
  isOutside: typeof process.is_outside === "boolean" ? process.is_outside : null,
  isIgnored: process.is_ignored === true,
});

const readRef = (gpu) => ({ uuid: word(gpu.uuid) ?? "unknown", node: word(gpu.node), gpu_id: number(gpu.gpu_id), name: word(gpu.name) });

function readLease(lease) {
  const labels = isObject(lease.labels) ? lease.labels : {};
  const wishes = isObject(lease.wishes) ? lease.wishes : {};
  const gpus = objects(lease.gpus).map(readRef);
  return {
    id: word(lease.id) ?? "unknown",
    state: word(lease.state) ?? "unknown",
    reason: word(lease.reason),
    end_reason: word(lease.end_reason),
    position: number(lease.position),
    gpus,
    nodes: [...new Set(gpus.map((gpu) => gpu.node))],
    owner: word(lease.owner),
    worker_id: word(lease.worker_id),
    host: word(lease.host),
    wishes: {
      gpus: number(wishes.gpus) ?? 1,
      nodes: number(wishes.nodes) ?? 1,
      memory_mb: number(wishes.memory_mb),
      model: word(wishes.model),
      among: Array.isArray(wishes.among) ? words(wishes.among) : null,
      time_limit_s: number(lease.time_limit_s),
      priority: number(lease.priority) ?? 0,
      preemptible: lease.preemptible === true,
    },
    requested_at: time(lease.requested_at),
    granted_at: time(lease.granted_at),
    ended_at: time(lease.ended_at),
    ends_at: time(lease.ends_at),
    warning: isObject(lease.warning) ? { reason: word(lease.warning.reason) ?? "unknown", ends_at: time(lease.warning.ends_at) } : null,
    idle_s: number(lease.idle_s),
    start: { at: time(lease.expected_start_at), basis: word(lease.expected_start_basis), after: word(lease.expected_after) },
    labels: Object.fromEntries(Object.entries(labels).filter(([, value]) => typeof value === "string")),
  };
}

function readReservation(reservation) {
  if (!isObject(reservation)) return null;
  const { lease_id, holder, gpus, starts_at, basis } = reservation;
  return { lease_id: word(lease_id), holder: word(holder) ?? "unknown", gpus: objects(gpus).map(readRef), starts_at: time(starts_at), basis: word(basis) };
}

function readBooking(booking) {
  const ends_at = time(booking.ends_at);
  const owner = word(booking.owner);
  return {
    id: word(booking.id) ?? "",
    gpus: objects(booking.gpus).map(readRef),
    owner,
    starts_at: time(booking.starts_at),
    ends_at,
    reason: word(booking.reason) ?? "",
    isDrain: owner === null && !Number.isFinite(ends_at),
  };
}

const readEvent = (event) => ({
  at: time(event.at),
  kind: word(event.kind) ?? "unknown",
  lease_id: word(event.lease_id),
  owner: word(event.owner),
  worker_id: word(event.worker_id),
  label: word(event.label),
  gpus: objects(event.gpus).map(readRef),
  reason: word(event.reason),
  by: word(event.by),
  note: word(event.note),
});

/** Until when leases without a time limit are predicted to last, by their ids. */
const readEnds = (ends) => new Map(objects(ends).map((end) => [word(end.lease_id), time(end.at)]));

function readForecast(forecast) {
  return objects(forecast?.models).map((each) => ({
    model: word(each.model),
    starts: objects(each.starts).map((one) => ({ gpus: number(one.gpus) ?? 1, at: time(one.at), basis: word(one.basis) })),
  }));
}

function readBoxes(boxes) {
  if (!Array.isArray(boxes)) return null;
  return objects(boxes).map((box) => ({
    node: word(box.node),
    isUnknown: box.state !== "up",
    isLeader: box.is_leader === true,
    version: word(box.version),
    heardAgoS: number(box.heard_ago_s),
  }));
}

const inOrder = new Intl.Collator("en", { numeric: true });

/** The boxes with their GPUs, in the order of their names; without a fleet, the one box. */
function boxesOf(pool, told) {
  const one = { node: pool.node, isUnknown: false, isLeader: false, version: null, heardAgoS: null };
  if (told === null) return [{ ...one, gpus: pool.gpus }];
  const boxes = new Map(told.map((box) => [box.node, { ...box, gpus: [] }]));
  for (const gpu of pool.gpus) {
    if (!boxes.has(gpu.node)) boxes.set(gpu.node, { ...one, node: gpu.node, isUnknown: true, gpus: [] });
    boxes.get(gpu.node).gpus.push(gpu);
  }
  return [...boxes.values()].sort((a, b) => inOrder.compare(a.node ?? "", b.node ?? ""));
}
