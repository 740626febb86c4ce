// The list of documents, in a dialog: opens, renames, duplicates, exports and deletes them, and searches their text.

import { classed, element, put } from "../elements.js";
import { Menu } from "../request/menu.js";
import { EXPORTS, nameOf } from "./file-formats.js";

const CONTEXT = 40; // characters shown on each side of a search result
const ACTIONS = { rename: "Rename", duplicate: "Duplicate", ...EXPORTS, delete: "Delete" };
const DAY = new Intl.DateTimeFormat("en", { dateStyle: "medium" }); // the page is in English
const TIME = new Intl.DateTimeFormat("en", { timeStyle: "short" });

export class DocumentList {
  #dialog;
  #handlers;
  #search = element("input");
  #rows = element("ul");
  #message = element("p");
  #undo = element("button", "Undo");
  #entries = [];
  #current = null;

  /**
   * `handlers`: onopen(id), oncreate(), onfiles(files), onrename(id, title), onduplicate(id), onexport(id, format),
   * onexportall() and ondelete(id).
   */
  constructor(dialog, handlers) {
    [this.#dialog, this.#handlers] = [dialog, handlers];
    const title = element("h2", "Documents");
    title.id = "documents-title";
    dialog.setAttribute("aria-labelledby", title.id);
    Object.assign(this.#search, { type: "search", placeholder: "Search titles and text", oninput: () => this.#draw() });
    this.#search.addEventListener("keydown", (event) => event.key === "Enter" && this.#rows.querySelector("button")?.click());
    this.#search.setAttribute("aria-label", "Search documents");
    this.#message.setAttribute("role", "status");
    Object.assign(this.#undo, { type: "button", className: "quiet", hidden: true });
    put(
      dialog,
      put(classed("header", "documents-head"), title, this.#buttons()),
      this.#search,
      put(classed("div", "documents-message"), this.#message, this.#undo),
      this.#rows,
    );
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close()); // on the backdrop
  }

  /** Opens the dialog, which is empty until show(). A deletion that can be undone stays there. */
  open() {
    if (this.#dialog.open) return;
    if (this.#undo.hidden) this.notify("");
    this.#search.value = "";
    this.#rows.replaceChildren();
    this.#dialog.showModal();
    this.#search.focus();
  }

  close() {
    this.#dialog.close();
  }

  /** Shows these entries (document-store.js); `current` is the id of the open one. */
  show(entries, current) {
    [this.#entries, this.#current] = [entries, current];
    this.#draw();
  }

  /** Says something, and offers to undo it. */
  notify(sentence, undo = null, { withFocus = undo !== null } = {}) {
    if (!undo && this.#undo === document.activeElement) this.#search.focus();
    this.#message.textContent = sentence;
    this.#undo.hidden = !undo;
    this.#undo.onclick = undo;
    if (withFocus) this.#undo.focus();
  }

  #buttons() {
    const file = Object.assign(element("input"), { type: "file", multiple: true, accept: ".txt,.md,.json,text/*", hidden: true });
    file.addEventListener("change", () => {
      this.#handlers.onfiles([...file.files]);
      file.value = ""; // the same file may be chosen again
    });
    return put(
      classed("div", "documents-buttons"),
      button("New", () => this.#handlers.oncreate(), "primary"),
      button("Import \u2026", () => file.click()),
      button("Export all", () => this.#handlers.onexportall()),
      button("Close", () => this.close()),
      file,
    );
  }

  // Keeps the focus on the row that had it.
  #draw() {
    const focused = this.#rows.contains(document.activeElement) ? document.activeElement.closest("li").dataset.id : null;
    const words = this.#search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#entries.filter((entry) => {
      const text = `${nameOf(entry)}\n${entry.text}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.#rows.replaceChildren(...found.map((entry) => this.#row(entry, words[0])));
    const none = words.length ? "No document has these words." : "No documents yet. What you write is kept here.";
    if (!found.length) this.#rows.append(classed("li", "documents-none", none));
    if (focused === null) return;
    const row = [...this.#rows.children].find(({ dataset }) => dataset.id === focused);
    (row?.querySelector("button") ?? this.#search).focus();
  }

  #row(entry, word) {
    const row = element("li");
    row.dataset.id = entry.id;
    const name = nameOf(entry);
    const open = button(name, () => this.#handlers.onopen(entry.id), "documents-title");
    const isCurrent = entry.id === this.#current;
    if (isCurrent) open.setAttribute("aria-current", "true");
    const words = around(entry.text, word) || facts(entry, isCurrent);
    put(row, put(classed("div", "documents-words"), open, classed("p", "documents-facts", words)));
    const menu = new Menu(row, { label: "More", items: ACTIONS, onpick: (action) => this.#act(action, entry, open) });
    menu.element.firstChild.setAttribute("aria-label", `More: ${name}`);
    return row;
  }

  #act(action, entry, open) {
    if (action === "rename") this.#rename(entry, open);
    else if (action === "duplicate") this.#handlers.onduplicate(entry.id);
    else if (action === "delete") this.#handlers.ondelete(entry.id);
    else this.#handlers.onexport(entry.id, action);
  }

  // Enter keeps the title, and so does leaving the field. Escape cancels. Without a title, the beginning of the text is it.
  #rename(entry, open) {
    const name = nameOf(entry);
    const field = Object.assign(element("input"), { type: "text", className: "documents-title", value: name, maxLength: 200 });
    field.setAttribute("aria-label", `Title of ${name}`);
    let isDone = false;
    const end = (title) => {
      if (isDone) return;
      isDone = true;
      const hadFocus = field === document.activeElement;
      field.replaceWith(open);
      if (hadFocus) open.focus();
      if (title !== null && title !== name) this.#handlers.onrename(entry.id, title);
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault(); // Escape would close the dialog
      end(event.key === "Enter" ? field.value.trim() : null);
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    open.replaceWith(field);
    field.focus();
    field.select();
  }
}

function facts({ text, runs, changed }, isCurrent) {
  const words = text.match(/\S+/g)?.length ?? 0;
  const isToday = DAY.format(changed) === DAY.format(Date.now());
  const parts = [isCurrent ? "open" : "", counted(words, "word"), runs ? counted(runs, "run") : ""];
  return [...parts, isToday ? TIME.format(changed) : DAY.format(changed)].filter(Boolean).join(" \u00b7 ");
}

function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

// The text around the first place where it has this word, or "".
function around(text, word) {
  const at = word ? text.toLowerCase().indexOf(word) : -1;
  if (at < 0) return "";
  return `\u2026 ${text.slice(Math.max(at - CONTEXT, 0), at + word.length + CONTEXT).replace(/\s+/g, " ")} \u2026`;
}

function button(words, onclick, names = "") {
  return Object.assign(element("button", words), { type: "button", className: names, onclick });
}
