// What time it is by the server, whose times are shown. The clock of the reader's machine may be another one.

let serverMs = NaN;
let heardAt = 0;

/** The server has just said what time it is. */
export function setNow(ms) {
  serverMs = ms;
  heardAt = performance.now();
}

export const nowMs = () => serverMs + performance.now() - heardAt;

/** How long ago it was said. */
export const saidAgoS = () => (performance.now() - heardAt) / 1000;
