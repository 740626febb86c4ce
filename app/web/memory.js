// What the page remembers over a reload: the tree of texts and the settings, under one key. Written a moment after
// the last change, and at once when the page goes: for this tab, which another one must not take its text from, and for
// the next visit, where the last write wins.

const KEY = "inkstream.notebook";
const DELAY = 400; // ms
const PLACES = [() => sessionStorage, () => localStorage]; // a browser may refuse them by an exception
let written = null;
let timer = 0;
let waiting = null; // () => states, or null: nothing to write
let tell = null;

/** What was remembered, or null on a first visit. */
export function load() {
  try {
    written = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
    return JSON.parse(written);
  } catch {
    // Storage is switched off, or holds what some other page wrote: a first visit then.
    return null;
  }
}

/**
 * `states()`: what to write, the fullest first; a shorter one where the storage has no room for it. `told(place)` hears
 * which of them was written, also where it is the same as before: beyond the last one, it was none.
 */
export function remember(states, told) {
  [waiting, tell] = [states, told];
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
  const kept = PLACES.map((place) => texts.findIndex((text) => put(place, text)));
  [written] = texts;
  tell(Math.max(...kept.map((index) => (index < 0 ? texts.length : index))));
}

function put(place, text) {
  try {
    place().setItem(KEY, text);
    return true;
  } catch {
    return false; // switched off or full: the page works, and says that it forgets
  }
}
