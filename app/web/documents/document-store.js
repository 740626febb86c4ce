// The store of documents: an IndexedDB database. An entry is what the list shows and what a search reads. The state, with
// the history and the settings, is read when its document is opened. A deleted document stays for a day, unless another
// one is deleted.

const NAME = "inkstream";
const ENTRIES = "entries";
const STATES = "states";
const DAY = 24 * 3600 * 1000; // ms

export class DocumentStore {
  #database = null; // a promise
  #memory = null; // id -> { entry, state }, where the browser refuses a database

  /** Whether documents outlive the page: not in some private windows. Known after the first call of another method. */
  get isLasting() {
    return this.#memory === null;
  }

  /** Every entry, { id, title, text, changed, runs }, the last changed first. */
  async entries() {
    const entries = (await this.#all()).filter(({ deleted }) => !deleted);
    return entries.sort((one, other) => other.changed - one.changed);
  }

  /** Deletes a document; put() brings it back. */
  async discard(entry, state) {
    await this.#forget(() => true);
    return this.put({ ...entry, deleted: Date.now() }, state);
  }

  /** The entry of the document that was deleted last, if it can be brought back. */
  async discarded() {
    await this.#forget(({ deleted }) => Date.now() - deleted > DAY);
    return (await this.#all()).find(({ deleted }) => deleted);
  }

  /** The state of a document, or undefined if there is none with this id. */
  state(id) {
    return this.#run("readonly", {
      stored: (stores) => stores[STATES].get(id),
      memory: (kept) => kept.get(id)?.state,
    });
  }

  /** Replaces the document with the entry's id. Rejects with a QuotaExceededError if the browser's storage is full. */
  put(entry, state) {
    return this.#run("readwrite", {
      stored: (stores) => (stores[STATES].put(state, entry.id), stores[ENTRIES].put(entry)),
      memory: (kept) => kept.set(entry.id, { entry, state }),
    });
  }

  #all() {
    return this.#run("readonly", {
      stored: (stores) => stores[ENTRIES].getAll(),
      memory: (kept) => [...kept.values()].map(({ entry }) => entry),
    });
  }

  // Of those that were deleted.
  async #forget(isPast) {
    for (const { id } of (await this.#all()).filter((entry) => entry.deleted && isPast(entry))) {
      await this.#run("readwrite", {
        stored: (stores) => (stores[STATES].delete(id), stores[ENTRIES].delete(id)),
        memory: (kept) => kept.delete(id),
      });
    }
  }

  // One transaction, or the same in memory: a browser refuses the database for a whole visit or not at all.
  async #run(mode, { stored, memory }) {
    const database = await this.#open();
    if (!database) return memory(this.#memory);
    const transaction = database.transaction([ENTRIES, STATES], mode);
    const request = stored({ [ENTRIES]: transaction.objectStore(ENTRIES), [STATES]: transaction.objectStore(STATES) });
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  }

  async #open() {
    if (this.#memory) return null;
    try {
      const database = await (this.#database ??= connect());
      const forget = () => (this.#database = null);
      database.onclose = forget; // the user cleared the site's data
      database.onversionchange = () => (database.close(), forget()); // a newer page in another tab upgrades it
      return database;
    } catch {
      this.#memory = new Map();
      return null;
    }
  }
}

function connect() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(ENTRIES, { keyPath: "id" });
      request.result.createObjectStore(STATES);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
