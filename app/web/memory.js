// What the page stores across a reload: the tree of texts and the settings, under one key. Written a moment after
// the last change, and at once when the page closes: for this tab, whose text no other tab may take, and for
// the next visit, where the last write wins.

const KEY = "inkstream.notebook";
const DELAY = 400; // ms
const STORAGES = [() => sessionStorage, () => localStorage]; // a browser may refuse them by an exception
let written = null;
let timer = 0;
let waiting = null; // () => states, or null: nothing to write
let notify = null;

/** What was remembered, or null on a first visit. */
export function load() {
  try {
    written = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
    return JSON.parse(written);
  } catch {
    // Storage is switched off, or contains what another page wrote: treat it as a first visit.
    return null;
  }
}

/**
 * `states()`: what to write, the fullest first; a shorter one where the storage is too small. `onStored(index)` gets the
 * index of the one that was written, even if it is the same as before; an index beyond the last one means none.
 */
export function remember(states, onStored) {
  [waiting, notify] = [states, onStored];
  clearTimeout(timer);
  timer = setTimeout(flush, DELAY);
}

/** Writes what is waiting. */
export function flush() {
  clearTimeout(timer);
  const texts = (waiting?.() ?? []).map((state) => JSON.stringify(state));
  waiting = null;
  // An idle tab that is closed must not write its old text over what another tab has saved since.
  if (texts.length === 0 || texts[0] === written) return;
  const kept = STORAGES.map((storage) => texts.findIndex((text) => put(storage, text)));
  [written] = texts;
  notify(Math.max(...kept.map((index) => (index < 0 ? texts.length : index))));
}

function put(storage, text) {
  try {
    storage().setItem(KEY, text);
    return true;
  } catch {
    return false; // switched off or full: the page works, and says that it forgets
  }
}
