// What follows from the pool: the answer to "is there a GPU for me, and when?", what needs attention, what is mine. No document, no clock.

import { KINDS, STATE_WORDS } from "./pool.js";
import { clock, duration, gpuName, gpuNames, holderName, memory, name, plural, runs, say, shortModel, start, UNKNOWN, wants, WARNINGS } from "./words.js";

const IDLE_S = 1800;

export const stateWord = (state) => STATE_WORDS[state] ?? state;

/** How many GPUs there are of each kind, in the order of the kinds. Kinds without any are left out. */
export function countKinds(gpus) {
  const counts = new Map(Object.keys(KINDS).map((kind) => [kind, 0]));
  for (const gpu of gpus) counts.set(gpu.kind, counts.get(gpu.kind) + 1);
  return new Map([...counts].filter(([, count]) => count > 0));
}

/** Each model with its counts and the starts of a request that is made now, the one with most free GPUs first. */
export function modelsOf(view) {
  const models = new Map();
  for (const gpu of view.pool.gpus) models.set(gpu.name, [...(models.get(gpu.name) ?? []), gpu]);
  const starts = new Map(view.forecast.map((each) => [each.model, each.starts]));
  return [...models]
    .map(([model, gpus]) => ({ model, title: shortModel(model), gpus, kinds: countKinds(gpus), starts: starts.get(model) ?? [] }))
    .sort((a, b) => (b.kinds.get("free") ?? 0) - (a.kinds.get("free") ?? 0) || b.gpus.length - a.gpus.length);
}

/** The first sentence of the page. */
export function answerOf(view, models, nowMs) {
  const { pool } = view;
  if (pool.gpus.length === 0) return "There is no GPU here.";
  if (pool.trouble !== null) return "No GPU can be granted now.";
  const free = models.filter((each) => each.kinds.has("free"));
  const isOneModel = models.length === 1;
  if (free.length > 0) {
    const count = free.reduce((sum, each) => sum + each.kinds.get("free"), 0);
    const which = isOneModel || models.length > 2 ? "" : `: ${free.map((each) => `${each.kinds.get("free")} ${each.title}`).join(", ")}`;
    return `${count === 1 ? "1 GPU is" : `${count} GPUs are`} free${which}.`;
  }
  const soonest = models
    .flatMap((each) => each.starts.filter((one) => one.gpus === 1).map((one) => ({ ...one, title: each.title })))
    .filter((one) => Number.isFinite(one.at))
    .sort((a, b) => a.at - b.at)[0];
  if (soonest === undefined) return `No GPU is free, and it is not known when one will be.${pool.queueLength ? ` ${plural(pool.queueLength, "request")} wait${pool.queueLength === 1 ? "s" : ""}.` : ""}`;
  const when = soonest.at <= nowMs ? "now" : `about ${clock(soonest.at, nowMs)}`;
  return `No GPU is free. Ask now for 1${isOneModel ? " GPU" : ""}: ${when}${isOneModel ? "" : ` (${soonest.title})`}.`;
}

/** `1 GPU now`, `4 ~14:05`: the starts of a request that is made now, for each number of GPUs. */
export const startWords = (starts, nowMs) => starts.map((one) => ({ gpus: one.gpus, words: start(one.at, one.basis, nowMs) }));

/** Until when a lease lasts: declared, predicted, or not known at all. */
export function endOf(lease, view) {
  if (lease.warning !== null) return { at: lease.warning.ends_at, basis: "declared", why: WARNINGS[lease.warning.reason] ?? lease.warning.reason };
  if (Number.isFinite(lease.ends_at)) return { at: lease.ends_at, basis: "declared", why: null };
  const at = view.ends.get(lease.id);
  return Number.isFinite(at) ? { at, basis: "predicted", why: null } : { at: NaN, basis: "unknown", why: null };
}

/** `1 h 32 min (01:41)`, `~25 min`, `40 s: preempted`. */
export function leftWords(lease, view, nowMs) {
  const { at, basis, why } = endOf(lease, view);
  if (!Number.isFinite(at)) return "\u2013";
  const left = at <= nowMs ? "any moment" : duration((at - nowMs) / 1000);
  if (why !== null) return `${left}: ${why}`;
  return basis === "declared" ? `${left} (${clock(at, nowMs)})` : `~${left}`;
}

/** What is planned for a GPU: the reservation of the first waiter, bookings, a drain. */
export function plansOf(gpu, pool, nowMs) {
  const isMeant = (plan) => plan.gpus.some((one) => one.uuid === gpu.uuid);
  const plans = pool.bookings.filter(isMeant).map((booking) => {
    const why = booking.reason === "" ? [] : [": ", name(booking.reason)];
    if (booking.isDrain) return say`drains ${clock(booking.starts_at, nowMs)}${why}`;
    const from = booking.starts_at > nowMs ? `from ${clock(booking.starts_at, nowMs)} ` : "";
    return say`booked for ${name(booking.owner ?? "nobody")} ${from}to ${clock(booking.ends_at, nowMs)}${why}`;
  });
  const { reservation } = pool;
  if (reservation !== null && isMeant(reservation)) {
    plans.unshift(say`kept for ${name(reservation.holder)}, ${start(reservation.starts_at, reservation.basis, nowMs)}`);
  }
  return plans;
}

/** What an operator should look at; each with the GPU, lease or box that it is about. */
export function attentionOf(view, nowMs) {
  const { pool, boxes, isFleet } = view;
  const found = [];
  const add = (level, key, words, about = {}) => found.push({ level, key, words, ...about });
  if (pool.gpus.length === 0 && view.advice !== null) add("bad", "advice", [view.advice]);
  if (view.readingAgeS !== null && view.readingAgeS > view.staleAfterS) {
    add("bad", "stale", [`The GPUs have not been measured since ${clock(view.measuredAt * 1000, nowMs)}, so none is granted.`]);
  } else if (view.advice !== null && pool.gpus.length > 0 && pool.gpus.every((gpu) => gpu.kind === "unknown")) add("bad", "advice", [view.advice]);
  const leaderVersion = boxes.find((box) => box.isLeader)?.version ?? null;
  for (const box of boxes) {
    const heard = box.heardAgoS === null ? "not heard of" : `silent for ${duration(box.heardAgoS + (nowMs - view.now) / 1000)}`;
    if (box.isUnknown) add("bad", `box ${box.node}`, say`${name(box.node ?? "a box")} is ${heard}: ${plural(box.gpus.length, "GPU")} unknown, its leases go on`, { box });
    else if (leaderVersion !== null && box.version !== leaderVersion) add("warn", `version ${box.node}`, say`${name(box.node)} has version ${box.version ?? UNKNOWN}, the leader ${leaderVersion}`, { box });
  }
  const isHeard = new Set(boxes.filter((box) => !box.isUnknown).map((box) => box.node));
  for (const gpu of pool.gpus.filter((each) => !isFleet || isHeard.has(each.node))) {
    const where = gpuWords(gpu, isFleet);
    if (gpu.kind === "broken") add("bad", `broken ${gpu.key}`, say`${where}: ${name(gpu.reason)}`, { gpu });
    if (gpu.state === "outside") add("warn", `outside ${gpu.key}`, say`${where} is used outside the pool: ${outsider(gpu)}`, { gpu, isOutside: true });
    if (gpu.state === "draining") add("warn", `drains ${gpu.key}`, say`${where}: ${name(gpu.reason)}`, { gpu });
  }
  for (const lease of pool.leases.values()) {
    if (lease.idle_s === null || lease.idle_s < IDLE_S) continue;
    add("warn", `idle ${lease.id}`, say`${name(gpuNames(lease.gpus, isFleet))}: ${name(holderName(lease))} computes nothing since ${duration(lease.idle_s)}`, { lease });
  }
  return found;
}

export const gpuWords = (gpu, isFleet) => (isFleet && gpu.node ? say`${gpuName(gpu)} of ${name(gpu.node)}` : [gpuName(gpu)]);

/** Who uses a GPU outside the pool, as far as it is seen. */
function outsider(gpu) {
  const process = (gpu.processes ?? []).filter((each) => each.isOutside).sort((a, b) => (b.used_mb ?? 0) - (a.used_mb ?? 0))[0];
  if (process === undefined) return [name(gpu.reason)];
  return say`${name(process.user ?? "an unknown user")}, ${name(process.name ?? "a process")} (pid ${process.pid ?? UNKNOWN}), ${memory(process.used_mb)}`;
}

/** The leases of this owner: those that hold GPUs, and those that wait. */
export function mineOf(pool, owner) {
  const isMine = (lease) => owner !== null && lease.owner === owner;
  return { held: [...pool.leases.values()].filter((lease) => isMine(lease) && lease.state === "active"), waiting: pool.queue.filter(isMine) };
}

const HEAD = /^Position \d+ of \d+, waiting for .*?: /s;

// What the wishes of a request say already.
const IMPLIED = /^\d+ (not among the GPUs asked for|not on |.*, not )/;

/** The clauses of the reason why a request waits; without its position and its wishes, which are shown by themselves. */
export const clausesOf = (reason) => (reason ?? "").replace(HEAD, "").split("; ").filter((clause) => clause !== "" && !IMPLIED.test(clause));

/** The queue as rows: what most wait for once, equal neighbours of one owner as one row, and of each row what differs. */
export function queueOf(pool) {
  const all = pool.queue.map((lease) => new Set(clausesOf(lease.reason)));
  const common = (clause) => all.filter((clauses) => clauses.has(clause)).length > all.length / 2;
  const shared = all.length < 2 ? [] : [...new Set(all.flatMap((clauses) => [...clauses]))].filter(common);
  const rows = [];
  pool.queue.forEach((lease, i) => {
    const own = [...all[i]].filter((clause) => !shared.includes(clause)).join("; ");
    const row = { lease, leases: [lease], wants: wants(lease.wishes), runs: runs(lease), why: own };
    const last = rows.at(-1);
    const isLike = last !== undefined && lease.owner !== null && ["wants", "runs", "why"].every((key) => last[key] === row[key]) && last.lease.owner === lease.owner;
    if (isLike) last.leases.push(lease);
    else rows.push(row);
  });
  return { shared: shared.join("; "), rows };
}

/** What the filter finds: the GPUs by text and by kind, and how many there are of each kind by text alone. */
export function filtered(view, { find, show }, owner) {
  const sought = find.trim().toLowerCase();
  const byText = sought === "" ? view.pool.gpus : view.pool.gpus.filter((gpu) => searchText(gpu).includes(sought));
  const isMine = (gpu) => owner !== null && gpu.holders.some((lease) => lease.owner === owner);
  const isIdle = (gpu) => gpu.holders.some((lease) => lease.idle_s !== null);
  const counts = new Map([["all", byText.length], ...countKinds(byText), ["idle", byText.filter(isIdle).length], ["mine", byText.filter(isMine).length]]);
  const chosen = new Map([["all", () => true], ["idle", isIdle], ["mine", isMine]]);
  const isShown = chosen.get(show) ?? ((gpu) => gpu.kind === show || gpu.name === show);
  return { counts, gpus: byText.filter(isShown), isFiltered: sought !== "" || show !== "all" };
}

function searchText(gpu) {
  const words = gpu.holders.flatMap((lease) => [lease.id, lease.owner, lease.worker_id, lease.host, ...Object.values(lease.labels)]);
  return [gpu.node, gpuName(gpu), gpu.name, gpu.uuid, stateWord(gpu.state), KINDS[gpu.kind], gpu.reason, ...words].join("\n").toLowerCase();
}

/** The leases that hold GPUs, the longest first, with the mean utilization of their GPUs. */
export function leasesOf(view, shown) {
  const byUuid = new Map(view.pool.gpus.map((gpu) => [gpu.uuid, gpu]));
  const wanted = new Set(shown.flatMap((gpu) => gpu.holders));
  return [...view.pool.leases.values()]
    .filter((lease) => wanted.has(lease))
    .sort((a, b) => a.granted_at - b.granted_at)
    .map((lease) => {
      const busy = lease.gpus.map((gpu) => byUuid.get(gpu.uuid)?.utilization_percent ?? null).filter((value) => value !== null);
      return { lease, utilization: busy.length ? busy.reduce((a, b) => a + b, 0) / busy.length : null };
    });
}

/** Whether a person may end a lease, or cancel a booking. The server decides; this hides buttons that would fail. */
export const mayManage = (me, thing) => me !== null && (me.isOperator || (thing.owner !== null && thing.owner === me.name));
