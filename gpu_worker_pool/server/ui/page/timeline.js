// One timeline of past and future: who held and holds each GPU and until when, what is booked, what drains, when waiters start. A span of
// the future is booked by dragging over it. Everything is placed in parts of the width, so that now is always in sight.

import { endOf, gpuWords, mayManage } from "./facts.js";
import { useRepeated } from "./live.js";
import { colourOf, Text } from "./parts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { clock, dateOf, duration, END_REASONS, gpuName, holderName, name, parseTime, plain, runs, say, start } from "./words.js";

const HOUR = 3_600_000;
const EVERY_MS = 60_000;
const MOST_ROWS = 64;
const MOST_TOLD = 6;
const STEPS_MIN = [10, 15, 30, 60, 120, 180, 240, 360, 720, 1440];

/** The spans that can be chosen: hours back and hours ahead. The server has the past of 1, 6, 24 and 168 hours. */
export const SPANS = {
  hours: { back: 6, ahead: 6, words: "6 h back and ahead" },
  day: { back: 6, ahead: 24, words: "a day ahead" },
  week: { back: 24, ahead: 168, words: "a week ahead" },
  past: { back: 168, ahead: 24, words: "a week back" },
};

/** Round times between two times, few enough that their texts do not touch. Counted from a local midnight, because not every day has 24 hours. */
export function marks(from, to, most = 10) {
  const step = STEPS_MIN.find((minutes) => (to - from) / (minutes * 60_000) <= most) ?? 1440;
  const first = new Date(from);
  const found = [];
  for (let number = 0; ; number += 1) {
    const at = new Date(first.getFullYear(), first.getMonth(), first.getDate(), 0, number * step).getTime();
    if (at >= to) return found;
    if (at > from && at !== found.at(-1)) found.push(at);
  }
}

/** Leases that share a GPU at the same time are stacked: each bar with its lane, and how many lanes there are. */
export function inLanes(bars) {
  const placed = [];
  let together = [];
  let ends = [];
  const settle = () => {
    placed.push(...together.map((bar) => ({ ...bar, lanes: ends.length })));
    [together, ends] = [[], []];
  };
  for (const bar of [...bars].sort((a, b) => a.from - b.from)) {
    if (ends.every((end) => end <= bar.from)) settle();
    const free = ends.findIndex((end) => end <= bar.from);
    const lane = free < 0 ? ends.length : free;
    ends[lane] = bar.to;
    together.push({ ...bar, lane });
  }
  settle();
  return placed;
}

/** What lies within `width` of the first of a group belongs to that group, so that the words of two groups do not overlap. */
export function together(things, placeOf, width) {
  const groups = [];
  for (const thing of [...things].sort((a, b) => placeOf(a) - placeOf(b))) {
    const group = groups.at(-1);
    if (group !== undefined && placeOf(thing) - placeOf(group[0]) < width) group.push(thing);
    else groups.push([thing]);
  }
  return groups;
}

/** The bars of one GPU between two times. `spans` are those of the past; what is held now is in the pool, which is newer. */
export function barsOf(gpu, spans, view, nowMs, { from, to }) {
  const live = new Set(gpu.holders.map((lease) => lease.id));
  const past = spans
    .filter((span) => !live.has(span.lease_id))
    .map((span) => {
      const [since, until] = [parseTime(span.since), span.until === null ? nowMs : parseTime(span.until)];
      const how = span.until === null ? "until now" : `to ${clock(until, nowMs)}, ${END_REASONS[span.end_reason] ?? span.end_reason}`;
      return { kind: "past", key: span.lease_id, from: since, to: until, owner: span.owner, words: say`${who(span)} from ${clock(since, nowMs)} ${how}; ${duration((until - since) / 1000)}` };
    });
  const held = gpu.holders.map((lease) => {
    const end = lease.state === "active" ? endOf(lease, view) : { at: NaN, basis: "unknown" };
    const known = Number.isFinite(end.at) ? `${end.basis === "declared" ? "until" : "probably until"} ${clock(end.at, nowMs)}` : "end unknown";
    const until = Number.isFinite(end.at) ? Math.max(end.at, nowMs) : nowMs;
    return { kind: "held", key: lease.id, from: lease.granted_at, to: until, basis: end.basis, owner: lease.owner, words: say`${who(lease)} since ${clock(lease.granted_at, nowMs)}, ${known}` };
  });
  const isMeant = (plan) => plan.gpus.some((one) => one.uuid === gpu.uuid);
  const plans = view.pool.bookings.filter(isMeant).map((booking) => {
    const why = booking.reason === "" ? [] : [": ", name(booking.reason)];
    const until = Number.isFinite(booking.ends_at) ? booking.ends_at : Infinity;
    const words = booking.isDrain ? say`drains from ${clock(booking.starts_at, nowMs)}${why}` : say`booked for ${name(booking.owner ?? "nobody")} from ${clock(booking.starts_at, nowMs)} to ${clock(booking.ends_at, nowMs)}${why}`;
    return { kind: booking.isDrain ? "drain" : "booked", key: booking.id, from: booking.starts_at, to: until, owner: booking.owner, booking, words };
  });
  const { reservation } = view.pool;
  if (reservation !== null && isMeant(reservation)) {
    const at = Math.max(reservation.starts_at, nowMs);
    plans.push({ kind: "ghost", key: "reservation", from: at, to: at + (to - nowMs) / 12, owner: reservation.holder, words: say`kept for ${name(reservation.holder)}, ${start(at, reservation.basis, nowMs)}` });
  }
  const isSeen = (bar) => bar.to > from && bar.from < to;
  return [...inLanes([...past, ...held].filter(isSeen)), ...plans.filter(isSeen).map((bar) => ({ ...bar, lane: 0, lanes: 1 }))];
}

function who(lease) {
  const what = runs(lease);
  return what === "" ? [name(holderName(lease))] : [name(holderName(lease)), " (", name(what), ")"];
}

/** The span that was dragged over: at least one step long, within the future, its ends on round times. */
export function dragged(fromMs, toMs, nowMs, stepMs) {
  const [low, high] = [Math.min(fromMs, toMs), Math.max(fromMs, toMs)];
  const start = Math.max(Math.floor(low / stepMs) * stepMs, Math.ceil(nowMs / 60_000) * 60_000);
  return { from: start, to: Math.max(Math.ceil(high / stepMs) * stepMs, start + stepMs) };
}

export function Timeline({ page, gpus }) {
  const { view, url, go, nowMs, me, isConnected, open, scope, changedAt } = page;
  const span = SPANS[url.span] ?? SPANS.hours;
  const { answer, error } = useRepeated(`${scope}timeline?hours=${span.back}`, EVERY_MS, isConnected, changedAt);
  const [pointed, setPointed] = useState(null);
  const [drag, setDrag] = useState(null);
  const frame = useRef(null);
  // To the minute, so that the bars do not creep.
  const base = Math.floor(nowMs / 60_000) * 60_000;
  const range = { from: base - span.back * HOUR, to: base + span.ahead * HOUR };
  const place = (ms) => (100 * (Math.min(Math.max(ms, range.from), range.to) - range.from)) / (range.to - range.from);
  const stepMs = (span.back + span.ahead > 48 ? 60 : 15) * 60_000;
  const shown = gpus.slice(0, MOST_ROWS);
  const spans = new Map((answer?.gpus ?? []).map((gpu) => [gpu.uuid, gpu.spans]));
  const mayBook = me !== null && isConnected;
  useDragging(frame, { mayBook, shown, range, nowMs, stepMs, setDrag, open });
  const waiters = view.pool.queue.filter((lease) => lease.start.at > nowMs && lease.start.at < range.to);
  // Those that start at about the same time have one flag.
  const flags = together(waiters, (lease) => place(lease.start.at), page.isNarrow ? 18 : 6);

  return html`<section class="timeline" aria-label="Timeline">
    <div class="head"><h2>Timeline</h2>
      <label class="quiet"><span class="hidden">Show</span><select value=${url.span} onChange=${(event) => go({ span: event.target.value })}>
        ${Object.entries(SPANS).map(([key, { words }]) => html`<option value=${key} selected=${key === url.span}>${words}</option>`)}
      </select></label>
      ${mayBook && html`<button type="button" onClick=${() => open({ kind: "book", gpus: [], from: null, to: null })}>Book…</button>`}
      <p class="quiet clamped" aria-live="off">${pointed !== null ? html`<${Text}
        parts=${pointed} />` : mayBook ? "Drag over free future to book it." : ""}${noteOn(answer, error, range, nowMs)}</p>
    </div>
    <div class="chart" ref=${frame} data-may-book=${mayBook || null} onPointerLeave=${() => setPointed(null)}>
      <div class="axis" aria-hidden="true">${marks(range.from, range.to).map((at) => html`<span key=${at}
        style=${{ left: `${place(at)}%` }}>${axisWords(at, range)}</span>`)}</div>
      ${shown.map((gpu, row) => html`<${Line} key=${gpu.key} gpu=${gpu} bars=${barsOf(gpu, spans.get(gpu.uuid) ?? [], view, nowMs, range)}
        drag=${drag !== null && row >= drag.first && row <= drag.last ? drag : null} ...${{ page, place, nowMs, setPointed }} />`)}
      ${waiters.length > 0 && html`<div class="track-row queue-row" role="group"
        aria-label=${`Starts of waiters: ${waiters.map((lease) => plain(say`${name(holderName(lease))} ${start(lease.start.at, lease.start.basis, nowMs)}`)).join(", ")}`}>
        <span class="label" aria-hidden="true">starts</span><div class="track" aria-hidden="true">
        ${flags.map((leases) => html`<span key=${leases[0].id} class="flag" style=${{ left: `${place(leases[0].start.at)}%` }}
          title=${leases.map((lease) => plain(say`${who(lease)} ${start(lease.start.at, lease.start.basis, nowMs)}`)).join(", ")}>${leases.map((lease, i) => html`${i > 0 && ", "}<bdi>${holderName(lease)}</bdi>`)}</span>`)}
        <i class="now" style=${{ left: `${place(nowMs)}%` }}></i></div></div>`}
    </div>
    ${gpus.length > shown.length && html`<p class="quiet">${gpus.length - shown.length} more GPUs are not shown; filter them.</p>`}
  </section>`;
}

function Line({ gpu, bars, page, place, nowMs, setPointed, drag }) {
  const { view, me, isConnected, open } = page;
  const told = bars.slice(-MOST_TOLD).map((bar) => plain(bar.words));
  const style = (bar, from, to) => ({ left: `${place(from)}%`, width: `${Math.max(place(to) - place(from), 0.15)}%`, top: `${(100 * bar.lane) / bar.lanes}%`, height: `${100 / bar.lanes}%` });
  return html`<div class="track-row" role="group" aria-label=${`${plain(gpuWords(gpu, view.isFleet))}: ${told.join("; ") || "nothing"}`}>
    <span class="label" aria-hidden="true" title=${gpuName(gpu)}>${view.isFleet ? `${gpu.node ?? ""}:` : ""}${gpu.gpu_id ?? "?"}</span>
    <div class="track" data-kind=${gpu.kind}>
      ${bars.map((bar) => {
        const point = () => setPointed(bar.words);
        const title = plain(bar.words);
        if (bar.booking !== undefined && isConnected && mayManage(me, bar)) {
          return html`<button key=${bar.key} type="button" class="bar" data-kind=${bar.kind} style=${style(bar, bar.from, bar.to)} title=${title}
            aria-label=${`Cancel: ${title}`} onPointerEnter=${point}
            onClick=${() => (bar.kind === "drain" ? open({ kind: "undrain", gpus: [gpu], drain: bar.booking }) : open({ kind: "unbook", booking: bar.booking }))}>
            <bdi>${bar.owner ?? "drain"}</bdi></button>`;
        }
        const colour = bar.kind === "past" || bar.kind === "held" ? `owner-${colourOf(bar.owner)}` : "";
        const end = bar.kind === "held" ? Math.min(bar.to, nowMs) : bar.to;
        return html`<span key=${bar.key} class=${`bar ${colour}`} data-kind=${bar.kind} style=${style(bar, bar.from, end)} title=${title} onPointerEnter=${point}
          onClick=${point}><bdi>${bar.owner ?? "drain"}</bdi></span>
          ${bar.kind === "held" && bar.to > nowMs && html`<span key=${`${bar.key} rest`} class=${`bar ${colour}`} data-kind="ahead" data-basis=${bar.basis}
            style=${style(bar, nowMs, bar.to)} title=${title} onPointerEnter=${point} onClick=${point}></span>`}`;
      })}
      ${drag !== null && html`<span class="bar" data-kind="dragged" style=${style({ lane: 0, lanes: 1 }, drag.from, drag.to)}></span>`}
      <i class="now" aria-hidden="true" style=${{ left: `${place(nowMs)}%` }}></i>
    </div>
  </div>`;
}

/** Follows a drag over the tracks, from its first to its last GPU; Escape gives it up. */
function useDragging(frame, now) {
  const latest = useRef(now);
  latest.current = now;
  useEffect(() => {
    const root = frame.current;
    let began = null;
    const spot = (event) => {
      const { range } = latest.current;
      const tracks = [...root.querySelectorAll(".track-row:not(.queue-row) .track")];
      const at = tracks.findIndex((track) => event.clientY < track.getBoundingClientRect().bottom);
      const row = at < 0 ? tracks.length - 1 : at;
      const box = tracks[row].getBoundingClientRect();
      return { row, ms: range.from + ((event.clientX - box.left) / box.width) * (range.to - range.from) };
    };
    const selection = (event) => {
      const here = spot(event);
      const { nowMs, stepMs } = latest.current;
      return { ...dragged(began.ms, here.ms, nowMs, stepMs), first: Math.min(began.row, here.row), last: Math.max(began.row, here.row) };
    };
    const down = (event) => {
      const { mayBook, nowMs } = latest.current;
      if (!mayBook || event.button !== 0 || event.pointerType === "touch" || event.target.closest("button, .label, .axis")) return;
      const here = spot(event);
      if (here.ms <= nowMs) return;
      began = here;
      root.setPointerCapture(event.pointerId);
      event.preventDefault();
    };
    const move = (event) => began !== null && latest.current.setDrag(selection(event));
    const stop = () => {
      began = null;
      latest.current.setDrag(null);
    };
    const up = (event) => {
      if (began === null) return;
      const { first, last, from, to } = selection(event);
      const { shown, open } = latest.current;
      stop();
      open({ kind: "book", gpus: shown.slice(first, last + 1), from, to });
    };
    const key = (event) => event.key === "Escape" && began !== null && stop();
    const heard = { pointerdown: down, pointermove: move, pointerup: up, pointercancel: stop };
    const over = new AbortController();
    for (const [kind, hear] of Object.entries(heard)) root.addEventListener(kind, hear, { signal: over.signal });
    addEventListener("keydown", key, { signal: over.signal });
    return () => over.abort();
  }, []);
}

const HOURS = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const DAYS = new Intl.DateTimeFormat("en-GB", { weekday: "short", day: "numeric" });

function axisWords(at, { from, to }) {
  const isMidnight = new Date(at).getHours() === 0 && new Date(at).getMinutes() === 0;
  return to - from > 72 * HOUR || isMidnight ? DAYS.format(at) : HOURS.format(at);
}

function noteOn(answer, error, range, nowMs) {
  if (error !== null) return ` The past is not available now: ${error}`;
  if (answer === null) return "";
  const complete = parseTime(answer.complete_since);
  if (answer.is_cut) return " There are too many leases to show; those that ended first are left out.";
  if (complete > range.from) return ` Not all leases that ended before ${nowMs - complete > 72 * HOUR ? dateOf(complete) : clock(complete, nowMs)} are known.`;
  return answer.unknown_leases ? ` ${answer.unknown_leases} leases are left out, because a clock was set meanwhile.` : "";
}
