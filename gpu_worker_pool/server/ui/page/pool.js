// Reads a pool. The server may have another version than this page, so a value of an unexpected kind counts as unknown.

/** All states of a GPU, in the order in which they are shown. */
export const STATES = ["free", "leased", "shared", "held", "draining", "busy", "outside", "out_of_service", "unhealthy", "unknown"];

const word = (value) => (typeof value === "string" ? value : null);
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const objects = (value) => (Array.isArray(value) ? value.filter(isObject) : []);
const words = (value) => (Array.isArray(value) ? value.filter((item) => typeof item === "string") : []);

/** Give each item a unique `key`, even if two have the same name. */
function withKeys(items, name) {
  const seen = new Map();
  return items.map((item) => {
    const number = seen.get(item[name]) ?? 0;
    seen.set(item[name], number + 1);
    return { ...item, key: number === 0 ? item[name] : `${item[name]} ${number}` };
  });
}

export function readPool(answer) {
  const pool = isObject(answer) ? answer : {};
  const leases = new Map(objects(pool.leases).map(readLease).map((lease) => [lease.id, lease]));
  const queue = withKeys(objects(pool.queue).map(readLease), "id");
  const gpus = withKeys(objects(pool.gpus).map(readGpu), "uuid");
  nameGpus(leases, gpus);
  return {
    node: word(pool.node),
    source: word(pool.source),
    serverId: word(pool.server_id),
    trouble: word(pool.trouble),
    thresholds: {
      memory_percent: number(pool.thresholds?.memory_percent) ?? 100,
      utilization_percent: number(pool.thresholds?.utilization_percent) ?? 100,
    },
    gpus,
    leases,
    queue,
    hasIdle: [...leases.values()].some((lease) => lease.idle_s !== null),
    reservation: readReservation(pool.reservation),
    bookings: objects(pool.bookings).map(readBooking),
    queueLength: Math.max(number(pool.queue_length) ?? 0, queue.length),
  };
}

/** In brief a lease does not name its GPUs: they name it. */
function nameGpus(leases, gpus) {
  for (const gpu of gpus) {
    for (const id of gpu.leases) {
      const lease = leases.get(id);
      if (lease === undefined || lease.namesGpus) continue;
      lease.gpus.push(gpu);
      if (!lease.nodes.includes(gpu.node)) lease.nodes.push(gpu.node);
    }
  }
}

/** Add what the server says of one GPU in full to a pool that it sent in brief. */
export function addDetails(pool, answer) {
  const gpu = readGpu(isObject(answer.gpu) ? answer.gpu : {});
  const place = pool.gpus.findIndex((each) => each.uuid === gpu.uuid && each.node === gpu.node);
  if (place < 0) return;
  const { reason, processes, outside_mb, temperature_c, power_draw_w } = gpu;
  pool.gpus[place] = { ...pool.gpus[place], reason, processes, outside_mb, temperature_c, power_draw_w };
  for (const lease of objects(answer.leases).map(readLease)) {
    if (pool.leases.has(lease.id)) pool.leases.set(lease.id, lease); // else it has ended since
  }
}

/** What the leader knows of the boxes of a fleet; null on one box. */
export function readBoxes(boxes) {
  if (!Array.isArray(boxes)) return null;
  return objects(boxes).map((box) => ({
    node: word(box.node),
    url: /^https?:/.test(word(box.url) ?? "") ? box.url : null,
    state: box.state === "up" ? "up" : "unknown",
    isLeader: box.is_leader === true,
    version: word(box.version),
    heardAgoS: number(box.heard_ago_s),
  }));
}

export function readFleet(fleet) {
  if (!isObject(fleet)) return null;
  return { id: word(fleet.id), leader: word(fleet.leader), epoch: number(fleet.epoch), role: word(fleet.role), lag_s: number(fleet.lag_s) };
}

/** The leases on a GPU. */
export function holdersOf(gpu, pool) {
  return gpu.leases.map((id) => pool.leases.get(id)).filter((lease) => lease !== undefined);
}

function readGpu(gpu) {
  const total_mb = number(gpu.memory_total_mb);
  const used_mb = number(gpu.memory_used_mb);
  return {
    uuid: word(gpu.uuid) ?? "unknown",
    node: word(gpu.node),
    gpu_id: number(gpu.gpu_id),
    name: word(gpu.name),
    state: STATES.includes(gpu.state) ? gpu.state : "unknown",
    reason: word(gpu.reason) ?? "",
    leases: words(gpu.leases),
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

function readProcess(process) {
  return {
    pid: number(process.pid),
    name: word(process.name),
    user: word(process.user),
    used_mb: number(process.used_mb),
    isOutside: typeof process.is_outside === "boolean" ? process.is_outside : null,
    isIgnored: process.is_ignored === true,
  };
}

const uuids = (gpus) => objects(gpus).map((gpu) => word(gpu.uuid));

function readReservation(reservation) {
  if (!isObject(reservation)) return null;
  const { holder, gpus, starts_at, basis } = reservation;
  return { holder: word(holder) ?? "unknown", gpus: uuids(gpus), starts_at: Date.parse(word(starts_at) ?? ""), basis: word(basis) };
}

function readBooking(booking) {
  return {
    gpus: uuids(booking.gpus),
    owner: word(booking.owner),
    starts_at: Date.parse(word(booking.starts_at) ?? ""),
    ends_at: Date.parse(word(booking.ends_at) ?? ""),
    reason: word(booking.reason) ?? "",
  };
}

function readLease(lease) {
  const labels = isObject(lease.labels) ? lease.labels : {};
  const gpus = objects(lease.gpus).map((gpu) => ({ uuid: word(gpu.uuid) ?? "unknown", node: word(gpu.node), gpu_id: number(gpu.gpu_id), name: word(gpu.name) }));
  return {
    id: word(lease.id) ?? "unknown",
    state: word(lease.state) ?? "unknown",
    reason: word(lease.reason),
    end_reason: word(lease.end_reason),
    position: number(lease.position),
    gpus,
    namesGpus: Array.isArray(lease.gpus),
    nodes: [...new Set(gpus.map((gpu) => gpu.node))],
    owner: word(lease.owner),
    worker_id: word(lease.worker_id),
    host: word(lease.host),
    pid: number(lease.pid),
    priority: number(lease.priority),
    requested_at: Date.parse(word(lease.requested_at) ?? ""),
    granted_at: Date.parse(word(lease.granted_at) ?? ""),
    ended_at: Date.parse(word(lease.ended_at) ?? ""),
    expires_in_s: number(lease.expires_in_s),
    time_limit_s: number(lease.time_limit_s),
    preemptible: lease.preemptible === true,
    ends_at: Date.parse(word(lease.ends_at) ?? ""),
    warning: isObject(lease.warning) ? { reason: word(lease.warning.reason) ?? "unknown", ends_at: Date.parse(word(lease.warning.ends_at) ?? "") } : null,
    idle_s: number(lease.idle_s),
    expected_start_at: Date.parse(word(lease.expected_start_at) ?? ""),
    expected_start_basis: word(lease.expected_start_basis),
    expected_after: word(lease.expected_after),
    labels: Object.fromEntries(Object.entries(labels).filter(([, value]) => typeof value === "string")),
  };
}
