// A copy of the document's text in two colors: the user's and the model's. Each line is a block of its own, so that
// appending text lays out and paints only the last line.

import { element } from "../elements.js";

export class Mirror {
  #root;
  #block = null; // the line that the model writes into; null for the last one
  #behind = []; // the spans of that line after the model's position

  constructor(root) {
    this.#root = root;
  }

  /** Shows a caret in the model's color at the end while text streams there. */
  set isStreaming(value) {
    this.#root.classList.toggle("streaming", value);
  }

  /** Shows the whole text; `written`: [[start, end]] of what the model wrote. Changes only elements that differ. */
  paint(text, written) {
    this.close();
    const lines = split(text, written);
    const blocks = this.#root.children;
    while (blocks.length > lines.length) blocks[blocks.length - 1].remove();
    lines.forEach((parts, index) => paintLine(blocks[index] ?? this.#root.appendChild(element("div")), parts));
  }

  /** Until close(), append() writes at this offset instead of at the end. */
  open(offset) {
    let rest = offset;
    for (const block of this.#root.children) {
      const { length } = block.textContent;
      if (rest <= length) {
        this.#behind = splitAt(block, rest);
        this.#behind[0]?.classList.add("ahead"); // draws the model's caret before it
        this.#block = block;
        return;
      }
      rest -= length + 1; // its line end
    }
  }

  close() {
    [this.#block, this.#behind] = [null, []];
  }

  /** Appends text from the model at its position. */
  append(text) {
    const [first, ...more] = text.split("\n");
    this.#write(this.#block ?? this.#root.lastElementChild ?? this.#root.appendChild(element("div")), first);
    for (const line of more) this.#write(this.#newLine(), line);
  }

  #newLine() {
    const line = element("div");
    if (!this.#block) return this.#root.appendChild(line);
    this.#block.after(line);
    line.append(...this.#behind);
    this.#block = line;
    return line;
  }

  /** The DOMRect of the character at this offset, in window coordinates; null in an empty text. */
  place(offset) {
    let rest = offset;
    for (const block of this.#root.children) {
      const { length } = block.textContent;
      if (rest <= length) return rectAt(block, rest);
      rest -= length + 1; // its line end
    }
    return this.#root.lastElementChild?.getBoundingClientRect() ?? null;
  }

  #write(block, text) {
    if (text === "") return;
    const [first] = this.#behind;
    const last = first ? first.previousElementSibling : block.lastElementChild;
    if (last?.className === "written") last.lastChild.appendData(text);
    else block.insertBefore(span("written", text), first ?? null);
  }
}

function rectAt(block, offset) {
  let rest = offset;
  for (const { firstChild: text } of block.children) {
    if (rest <= text.length) {
      const range = document.createRange();
      range.setStart(text, rest);
      range.collapse(true);
      return [...range.getClientRects()].at(-1) ?? block.getBoundingClientRect();
    }
    rest -= text.length;
  }
  return block.getBoundingClientRect();
}

// The spans of this line after the offset; splits the span that contains it.
function splitAt(block, offset) {
  let rest = offset;
  for (const one of block.children) {
    const { length } = one.textContent;
    if (rest < length) {
      if (rest > 0) one.after(span(one.className, cutOff(one.firstChild, rest)));
      return [...block.children].slice([...block.children].indexOf(one) + Number(rest > 0));
    }
    rest -= length;
  }
  return [];
}

function cutOff(text, offset) {
  const { data } = text;
  text.deleteData(offset, data.length - offset);
  return data.slice(offset);
}

function paintLine(block, parts) {
  const spans = block.children;
  while (spans.length > parts.length) spans[spans.length - 1].remove();
  parts.forEach(([kind, piece], index) => {
    const old = spans[index];
    if (!old) block.append(span(kind, piece));
    else {
      if (old.className !== kind) old.className = kind;
      if (old.textContent !== piece) old.textContent = piece;
    }
  });
}

function span(kind, text) {
  const span = element("span", text);
  span.className = kind;
  return span;
}

// For each line a list of [kind, text], alternating between "own" and "written".
function split(text, written) {
  const lines = [[]];
  const put = (kind, stretch) => {
    const [first, ...more] = stretch.split("\n");
    if (first !== "") lines.at(-1).push([kind, first]);
    for (const line of more) lines.push(line === "" ? [] : [[kind, line]]);
  };
  let at = 0;
  for (const [start, end] of written) {
    put("own", text.slice(at, start));
    put("written", text.slice(start, end));
    at = end;
  }
  put("own", text.slice(at));
  return lines;
}
