// Server-sent events from raw bytes: feed() takes a chunk as the network cut it and returns the events that
// became complete. Follows the parsing rules of the HTML standard (9.2.6), which EventSource has built in but
// offers for GET only. Pure.

const BOM = "\uFEFF";

export class SseParser {
  #utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
  #line = ""; // the incomplete last line
  #first = true; // nothing decoded so far, so that a byte order mark may follow
  #afterCR = false; // the last chunk ended in CR, so a leading LF belongs to the same line end
  #data = [];
  #type = "";
  #id = "";

  /** Bytes (Uint8Array) in, a list of { type, data, id } out. Incomplete events wait for the next call. */
  feed(bytes) {
    const events = [];
    const lines = this.#decode(bytes).split(/\r\n|\r|\n/);
    lines[0] = this.#line + lines[0];
    this.#line = lines.pop();
    for (const line of lines) this.#take(line, events);
    return events;
  }

  // There is no flush(): the standard drops an event without a final empty line.

  #decode(bytes) {
    // stream: true keeps the bytes of a code point that is split between chunks.
    let text = this.#utf8.decode(bytes, { stream: true });
    if (text === "") return text;
    if (this.#first && text[0] === BOM) text = text.slice(1);
    this.#first = false;
    // A CR ends its line at once, so that an event never waits for the next byte. An LF at the beginning of the next chunk
    // is then skipped.
    if (this.#afterCR && text[0] === "\n") text = text.slice(1);
    this.#afterCR = text.endsWith("\r");
    return text;
  }

  #take(line, events) {
    if (line === "") return this.#dispatch(events);
    if (line[0] === ":") return; // a comment: the server's heartbeat
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    if (name === "event") this.#type = value;
    if (name === "id" && !value.includes("\0")) this.#id = value;
    // `retry` is for clients that reconnect automatically; other names are ignored.
  }

  #dispatch(events) {
    // Without data there is no event, but its name is dropped. The id stays until the next one.
    if (this.#data.length) {
      events.push({ type: this.#type || "message", data: this.#data.join("\n"), id: this.#id });
    }
    this.#data = [];
    this.#type = "";
  }
}
