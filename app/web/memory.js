// What the page remembers over a reload: the text and the settings, under one key of localStorage.
// Knows nothing of what they mean.

const KEY = "inkstream.page";
let written = null;

/** What save() kept, or null on a first visit. */
export function load() {
  try {
    written = localStorage.getItem(KEY);
    return JSON.parse(written);
  } catch {
    // Storage is switched off, or holds what some other page wrote: a first visit then.
    return null;
  }
}

export function save(state) {
  const text = JSON.stringify(state);
  // An idle tab that is closed must not write its old text over what another tab has saved since.
  if (text === written) return;
  try {
    localStorage.setItem(KEY, text);
    written = text;
  } catch {
    // Switched off or full: the page works, it just forgets.
  }
}
