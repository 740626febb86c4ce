// Displays the document and its runs: receives the events of the notebook and passes each to the parts of the page that
// show it.

import { CompletionError } from "./request/completion.js";
import { outline } from "./text/outline.js";
import { lastSentence } from "./text/sentences.js";

export class RunDisplay {
  #parts;
  #page;
  #span = null; // where the run writes, see Notebook.generate()
  #typed = {}; // the settings of the current run, as they were typed
  #nodes = []; // the tree's nodes, one for each continuation of the last run

  /** The notebook whose view this is; set before its first event. */
  notebook;

  /**
   * `parts`: { sheet, columns, branches, treeView, reading, announcer, status, panel, service, truncation, numbers }.
   * `page`: { onchange() the text or the run's state changed, onbegin() a run begins, onend() a run ended }.
   */
  constructor(parts, page) {
    [this.#parts, this.#page] = [parts, page];
  }

  /** Goes to the continuation with this index of the last run. */
  take(index) {
    this.notebook.go(this.#nodes[index].id);
  }

  /** Shows the seed of the current text's run, so that the user can lock it. */
  showSeed() {
    const seed = this.notebook.tree.lastRun?.facts.seed;
    if (seed) this.#parts.panel.showDefaults({ seed });
  }

  changed() {
    const { columns, truncation, sheet, reading } = this.#parts;
    columns.close();
    truncation.withdraw();
    sheet.show(this.notebook.text, this.notebook.written);
    this.labeled();
    reading.show(this.notebook);
    this.showSeed();
  }

  labeled() {
    const { branches, treeView } = this.#parts;
    const entries = outline(this.notebook.tree);
    branches.show(entries);
    treeView.show(entries);
    this.#page.onchange();
  }

  began(count, typed, names, span) {
    const { sheet, branches, columns, reading, service, status, truncation } = this.#parts;
    [this.#typed, this.#span] = [typed, span];
    this.#page.onbegin();
    sheet.open({ at: span?.start, isSeen: count === 1 });
    branches.hold(true);
    if (count > 1) this.#openColumns(count, names);
    else columns.close();
    reading.show(this.notebook);
    service.began();
    status.sent();
    truncation.withdraw();
    this.#page.onchange();
  }

  received(type, data) {
    const { status } = this.#parts;
    if (type === "start") this.#started(data);
    if (type === "queue") status.queued(data);
    if (type === "wait") status.waits(data);
    if (type === "lost") status.lost();
    if (type === "done") this.#finished(data);
  }

  wrote(index, unit, text) {
    const { columns, sheet, reading, announcer, status } = this.#parts;
    if (columns.isOpen) columns.append(index, text, unit.tokens);
    else {
      sheet.append(text);
      if (!this.#span) reading.append(unit, text); // text in the middle is shown when the run has ended
      announcer.stream(text);
    }
    status.token(index);
  }

  ended({ error, stopped, nodes }) {
    const { sheet, announcer, columns, branches, reading, status } = this.#parts;
    sheet.close();
    announcer.end();
    this.#nodes = nodes;
    if (this.#span && nodes.length === 1) sheet.show(this.notebook.text, this.notebook.written, nodes[0]?.facts.span.until);
    if (this.#span && columns.isOpen) this.#fitColumns();
    if (nodes.some(Boolean)) columns.end();
    else columns.close(); // no text
    branches.hold(false);
    this.labeled();
    reading.show(this.notebook);
    if (stopped) status.stopped();
    if (error) this.#failed(error);
    this.#page.onchange();
    this.#page.onend();
  }

  #openColumns(count, names) {
    const { text } = this.notebook;
    const { start, end } = this.#span ?? { start: text.length, end: text.length };
    this.#parts.columns.open(count, lastSentence(text.slice(0, start)), { names, replaced: text.slice(start, end) });
  }

  // Shows each continuation as it would be inserted into the text.
  #fitColumns() {
    this.#nodes.forEach((node, index) => {
      if (node) this.#parts.columns.fit(index, node.state.text.slice(node.facts.at, node.facts.span.until));
    });
  }

  #started(data) {
    const { status, panel, service, numbers } = this.#parts;
    status.started(data);
    const isComparison = Array.isArray(this.#typed); // with settings other than the panel's
    const all = Object.entries({ ...(isComparison ? {} : data.settings), seed: data.seed });
    panel.showDefaults(Object.fromEntries(all.filter(([name]) => !this.#typed[name])));
    if (!isComparison) service.show(data.model, data.weights_version); // the service may have reloaded its weights
    numbers.hidden = false;
    this.#page.onchange();
  }

  #finished(data) {
    const { status, columns, truncation } = this.#parts;
    status.done(data);
    if (!columns.isOpen && status.isFull && !truncation.covers(this.notebook.text)) truncation.offer();
    if (columns.isOpen) for (const { index, finish_reason: reason } of data.choices) columns.finish(index, reason);
  }

  #failed(error) {
    const { status, service, truncation } = this.#parts;
    status.failed(error.message);
    service.failed(error);
    if (error.detail?.code === "context_length_exceeded") truncation.offer();
    if (!(error instanceof CompletionError)) console.error(error); // a bug of the page, not a server error
  }
}
