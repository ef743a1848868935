// Choices that this browser remembers. No secret is ever among them.

const PREFIX = "gpu-pool.";

export function remembered(name) {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return null; // storage is forbidden: the choice lasts as long as the page
  }
}

/** Remember a choice; null forgets it. */
export function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, value);
  } catch {
    // As above.
  }
}
