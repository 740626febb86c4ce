// Stores the open document across reloads, under one key: a moment after the last change, and at once when the page
// closes. sessionStorage keeps this tab's document, localStorage the next visit's, where the last write wins.

const KEY = "inkstream.notebook";
const DELAY = 400; // ms
const STORAGES = [() => sessionStorage, () => localStorage]; // a browser may refuse them by an exception

export class Autosave {
  /** Whether this tab stored a document before: then the page was loaded again. */
  isReload = false;

  #page;
  #written = null; // JSON
  #timer = 0;
  #isWaiting = false;

  /** What was stored, or null on a first visit. */
  load() {
    try {
      const own = sessionStorage.getItem(KEY);
      this.isReload = own !== null;
      this.#written = own ?? localStorage.getItem(KEY);
      return JSON.parse(this.#written);
    } catch {
      // Storage is switched off, or contains what another page wrote: treat it as a first visit.
      return null;
    }
  }

  /**
   * `page`: { state() what to store; shorter(state) for where the storage is too small; isRunning() whether a run, whose
   * output so far is in the state, ends with the page; onstored(level) 0: all, 1: the shorter one, 2: nothing is stored }.
   */
  begin(page) {
    this.#page = page;
    const hidden = () => {
      this.#isWaiting ||= page.isRunning();
      this.#flush();
    };
    document.addEventListener("visibilitychange", hidden); // the last event that a phone sends to a page
    addEventListener("pagehide", hidden);
  }

  later() {
    this.#isWaiting = true;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#flush(), DELAY);
  }

  #flush() {
    clearTimeout(this.#timer);
    if (!this.#isWaiting) return;
    this.#isWaiting = false;
    const state = this.#page.state();
    const text = JSON.stringify(state);
    // An idle tab that is closed must not write its old text over what another tab has saved since.
    if (text === this.#written) return;
    this.#written = text;
    const levels = STORAGES.map((storage) => this.#put(storage, text, state));
    this.#page.onstored(Math.max(...levels));
  }

  #put(storage, text, state) {
    if (put(storage, text)) return 0;
    return put(storage, JSON.stringify(this.#page.shorter(state))) ? 1 : 2;
  }
}

function put(storage, text) {
  try {
    storage().setItem(KEY, text);
    return true;
  } catch {
    return false; // switched off or full
  }
}
