// The documents of this browser. The page shows one, which is stored with every change (autosave.js) and kept
// in the store with the others. A document is open in one tab only, so that no tab overwrites another's.

import { element } from "../elements.js";
import { Tree } from "../text/tree.js";
import { Autosave } from "./autosave.js";
import { DocumentList } from "./document-list.js";
import { DocumentStore } from "./document-store.js";
import { DocumentError, exported, exportedAll, imported, nameOf } from "./file-formats.js";

const BLANK = new Tree({ text: "", units: [] }).data;
const RELOAD_MS = 1500; // as long as a page that reloads may hold its lock
const RUNNING = "Stop the run first, or let it end.";
const LOCKED = "This document is open in another tab. Duplicate it to write here.";
const FULL = "The browser's storage is full: export documents and delete some.";
const TEMPORARY = "This browser keeps no documents beyond this visit: export them before you close the page.";
const WARNINGS = [
  "", // all of it is stored
  "The browser's storage is full: it keeps the text, not its history.",
  "The browser stores nothing here: copy the text before you close the page.",
];

export class Documents {
  #store = new DocumentStore();
  #autosave = new Autosave();
  #list;
  #button;
  #page;
  #current = { id: newId(), title: null }; // the open document
  #text = "";
  #isKept = false; // the store has it
  #baseline = ""; // of its state (fingerprint): as long as it is the same, there is nothing to save
  #release = () => {}; // gives the lock on it back
  #started; // a promise: this tab holds the lock
  #warning = ""; // the last one on the status line

  /** The state that was stored when the page closed, { tree, settings, truncation }, or null on a first visit. */
  stored;

  /** `elements`: { button, dialog, dropzone }. */
  constructor({ button, dialog, dropzone }) {
    this.#button = button;
    this.stored = this.#autosave.load();
    if (this.stored?.reach) this.stored.truncation = this.stored.reach; // as it was called until 2026-11
    if (typeof this.stored?.id === "string") this.#current = { id: this.stored.id, title: this.stored.title ?? null };
    const handlers = {
      onopen: (id) => this.#open(id),
      oncreate: () => this.#create(),
      onfiles: (files) => this.#importFiles(files),
      onrename: (id, title) => this.#rename(id, title || null),
      onduplicate: (id) => this.#duplicate(id),
      onexport: (id, format) => this.#export(id, format),
      onexportall: () => this.#exportAll(),
      ondelete: (id) => this.#delete(id),
    };
    const reporting = ([name, handle]) => [name, (...args) => this.#attempt(() => handle(...args))];
    this.#list = new DocumentList(dialog, Object.fromEntries(Object.entries(handlers).map(reporting)));
    button.addEventListener("click", () => this.#attempt(() => this.#showList()));
    this.#acceptFiles(dropzone);
  }

  /**
   * `page`: { capture() the state { tree, settings, truncation } of the open document, restore(state) shows another one,
   * isRunning(), focus() on the text, status
   * (status.js) }.
   */
  begin(page) {
    this.#page = page;
    const isUntouched = !this.stored || this.stored.isUntouched;
    if (isUntouched) this.#baseline = this.#fingerprint(page.capture());
    this.#started = this.#start();
    this.#autosave.begin({
      state: () => this.#state(),
      shorter: (state) => ({ ...state, isPartial: true, tree: new Tree(Tree.from(state.tree).current.state).data }),
      isRunning: page.isRunning,
      onstored: (level) => this.#stored(level),
    });
  }

  /** The text or the settings changed. */
  changed(text) {
    this.#text = text;
    const name = nameOf({ ...this.#current, text });
    if (this.#button.textContent !== name) {
      this.#button.textContent = name;
      this.#button.setAttribute("aria-label", `${name}, documents`);
      document.title = `${name} \u2013 inkstream`;
    }
    if (!this.#page.isRunning()) this.#autosave.later();
  }

  // A tab that was opened with the document of another tab shows a copy of it.
  async #start() {
    const { id, title } = this.#current;
    const release = await lock(id, this.#autosave.isReload ? RELOAD_MS : 0);
    if (!release) {
      this.#current = { id: newId(), title: `${nameOf({ title, text: this.#text })} (copy)` };
      this.#baseline = this.#fingerprint(this.#page.capture());
      return this.changed(this.#text);
    }
    this.#release = release;
    const kept = await this.#store.state(id);
    if (!kept) return;
    this.#isKept = true;
    this.#baseline = this.#fingerprint(kept);
    const isWhole = Tree.from(kept.tree).current.state.text === this.#text;
    if (this.stored?.isPartial && isWhole) this.#page.restore(kept); // the history did not fit into the other storage
  }

  async #stored(level) {
    const { status, isRunning } = this.#page;
    const failure = await this.#save().then(() => "", (error) => error.message);
    const warning = failure || (this.#store.isLasting ? "" : WARNINGS[level]);
    if (isRunning()) return;
    if (warning !== this.#warning && failure) status.failed(failure);
    else if (warning && warning !== this.#warning) status.show("idle", warning);
    this.#warning = warning;
  }

  // Keeps the open document in the store, if there is something new.
  async #save() {
    await this.#started;
    const state = this.#page.capture();
    if (!this.#isChanged(state)) return;
    await this.#keep(this.#current, state);
    this.#isKept = true;
    this.#baseline = this.#fingerprint(state);
  }

  #state() {
    const state = this.#page.capture();
    return { ...this.#current, isUntouched: !this.#isKept && !this.#isChanged(state), ...state };
  }

  #isChanged(state) {
    const isBlank = !this.#isKept && this.#text === "" && state.tree.nodes.length === 1;
    return !isBlank && this.#fingerprint(state) !== this.#baseline;
  }

  // Settings alone are not worth a new document. An empty one is the default, like one that is missing.
  #fingerprint({ tree, settings, truncation }) {
    if (!this.#isKept) return JSON.stringify(tree);
    return JSON.stringify([tree, Object.entries(settings ?? {}).filter(([, text]) => text !== ""), truncation]);
  }

  // Handlers of the list

  async #showList() {
    this.#list.open(); // at once: what is typed now is searched for
    await this.#save();
    await this.#refresh();
    await this.#offerUndo(false, { withFocus: false });
    if (!this.#store.isLasting) this.#list.notify(TEMPORARY);
  }

  async #refresh() {
    this.#list.show(await this.#store.entries(), this.#current.id);
  }

  async #open(id) {
    if (id !== this.#current.id) {
      const entry = await this.#entry(id);
      const release = await this.#leave(id);
      this.#show({ ...entry, state: await this.#store.state(id), isKept: true }, release);
    }
    this.#list.close();
    this.#page.focus();
  }

  async #create() {
    const blank = this.#blank();
    this.#show(blank, await this.#leave(blank.id));
    this.#list.close();
    this.#page.focus();
  }

  // Saves the open document, and locks another one. Returns its lock's release().
  async #leave(id) {
    if (this.#page.isRunning()) throw new DocumentError(RUNNING);
    await this.#save();
    const release = await lock(id);
    if (!release) throw new DocumentError(LOCKED);
    return release;
  }

  // Puts a document, which this tab has locked, on the page.
  #show({ id, title, state, isKept }, release) {
    this.#release();
    [this.#release, this.#current, this.#isKept] = [release, { id, title }, isKept];
    this.#page.restore(state);
    this.#baseline = this.#fingerprint(this.#page.capture());
  }

  // An empty document with the settings of the open one.
  #blank() {
    return { id: newId(), title: null, state: { ...this.#page.capture(), tree: BLANK, truncation: null }, isKept: false };
  }

  async #importFiles(files) {
    const [ids, failures] = [[], []];
    for (const file of files) {
      try {
        for (const { title, state } of imported(file.name, await bytesOf(file))) {
          ids.push(newId());
          await this.#keep({ id: ids.at(-1), title }, state);
        }
      } catch (error) {
        if (!(error instanceof DocumentError)) throw error;
        failures.push(error.message);
      }
    }
    await this.#refresh();
    if (ids.length === 1 && !failures.length && !this.#page.isRunning()) return this.#open(ids[0]);
    const count = ids.length - failures.filter((sentence) => sentence === FULL).length;
    const sentence = files.length > 1 || failures.length ? `Imported ${count} of ${files.length} files.` : `Imported ${count} documents.`;
    this.#list.notify([sentence, ...new Set(failures)].join(" "));
  }

  async #rename(id, title) {
    const entry = await this.#entry(id);
    await this.#exclusively(id, async () => this.#keep({ ...entry, title }, await this.#stateOf(id)));
    if (id === this.#current.id) {
      this.#current.title = title;
      this.changed(this.#text);
    }
    await this.#refresh();
  }

  async #duplicate(id) {
    const title = `${nameOf(await this.#entry(id))} (copy)`;
    await this.#keep({ id: newId(), title }, await this.#stateOf(id));
    await this.#refresh();
    this.#list.notify(`Made \u201c${title}\u201d.`);
  }

  async #export(id, format) {
    const { title } = await this.#entry(id);
    this.#download(exported(format, { title, state: await this.#stateOf(id) }));
  }

  async #exportAll() {
    const documents = [];
    for (const { id, title } of await this.#store.entries()) documents.push({ title, state: await this.#stateOf(id) });
    if (!documents.length) throw new DocumentError("There are no documents to export yet.");
    this.#download(exportedAll(documents));
  }

  #download({ name, type, content }) {
    const link = Object.assign(element("a"), { href: URL.createObjectURL(new Blob([content], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    this.#list.notify(`Exported ${name}.`);
  }

  async #delete(id) {
    const isOpen = id === this.#current.id;
    if (isOpen && this.#page.isRunning()) throw new DocumentError(RUNNING);
    const [entry, state] = [await this.#entry(id), await this.#stateOf(id)];
    await this.#exclusively(id, () => this.#store.discard(entry, state));
    if (isOpen) await this.#showLatest();
    await this.#refresh();
    await this.#offerUndo(isOpen);
  }

  async #offerUndo(wasOpen, focus = {}) {
    const entry = await this.#store.discarded();
    if (!entry) return;
    this.#list.notify(`Deleted \u201c${nameOf(entry)}\u201d.`, () => this.#attempt(() => this.#undelete(entry, wasOpen)), focus);
  }

  // In place of the open document, which was deleted: the one that was changed last, or an empty one.
  async #showLatest() {
    const [latest] = await this.#store.entries();
    const release = latest && (await lock(latest.id)); // another tab may have it open
    if (release) this.#show({ ...latest, state: await this.#store.state(latest.id), isKept: true }, release);
    else {
      const blank = this.#blank();
      this.#show(blank, await lock(blank.id));
    }
  }

  async #undelete({ deleted: _, ...entry }, wasOpen) {
    await this.#store.put(entry, await this.#store.state(entry.id));
    await this.#refresh();
    this.#list.notify(`Restored \u201c${nameOf(entry)}\u201d.`);
    if (wasOpen) await this.#open(entry.id);
  }

  async #entry(id) {
    const entry = (await this.#store.entries()).find((one) => one.id === id);
    if (!entry) throw new DocumentError("Another tab has deleted this document.");
    return entry;
  }

  async #stateOf(id) {
    return id === this.#current.id ? this.#page.capture() : this.#store.state(id);
  }

  async #keep({ id, title, changed = Date.now() }, state) {
    const { text } = Tree.from(state.tree).current.state;
    const runs = state.tree.nodes.filter(({ kind }) => kind === "run").length;
    try {
      await this.#store.put({ id, title, text, changed, runs }, state);
    } catch (error) {
      throw error?.name === "QuotaExceededError" ? new DocumentError(FULL) : error;
    }
  }

  async #exclusively(id, work) {
    if (id === this.#current.id) return work();
    const release = await lock(id);
    if (!release) throw new DocumentError("This document is open in another tab. Close it there first.");
    return work().finally(release);
  }

  #acceptFiles(dropzone) {
    const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes("Files");
    const mark = (isOver) => dropzone.classList.toggle("drop", isOver);
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    addEventListener("dragleave", ({ relatedTarget }) => relatedTarget || mark(false));
    addEventListener("drop", (event) => {
      mark(false);
      if (!hasFiles(event)) return;
      event.preventDefault(); // the browser would leave the page for the file
      const files = [...event.dataTransfer.files]; // gone after the first await
      this.#attempt(async () => {
        await this.#showList();
        await this.#importFiles(files);
      });
    });
  }

  async #attempt(work) {
    try {
      await work();
    } catch (error) {
      this.#list.open();
      this.#list.notify(error.message);
      if (!(error instanceof DocumentError)) console.error(error);
    }
  }
}

async function bytesOf(file) {
  try {
    return new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new DocumentError(`${file.name} cannot be read.`); // a folder, for example
  }
}

// Locks a document for this tab, and returns a function that releases it, or null where another tab has it for so long.
// Browsers have locks on https and on this machine; elsewhere the last write wins.
function lock(id, milliseconds = 0) {
  if (!navigator.locks) return () => {};
  const options = milliseconds ? { signal: AbortSignal.timeout(milliseconds) } : { ifAvailable: true };
  return new Promise((resolve) => {
    const hold = (held) => new Promise((release) => (held ? resolve(release) : release(resolve(null))));
    navigator.locks.request(`inkstream ${id}`, options, hold).catch(() => resolve(null));
  });
}

// Also where crypto.randomUUID() is missing: on http from another machine.
function newId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (number) => number.toString(36)).join("-");
}
