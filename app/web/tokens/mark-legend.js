// Below the inspect view: the choice of what the marks show with its legend, curves along the text, and a CSV export.

import { classed, element, put } from "../elements.js";
import { legend, MEASURES } from "./mark-scale.js";
import { binned, csv, rates, tokenTable } from "./statistics.js";
import { bits, surprise } from "./token.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [600, 40];
const BINS = 150;

export class MarkLegend {
  #root;
  #legend = element("div");
  #message = element("p");
  #curves = classed("figure", "curves");
  #table = [];

  /** `onmeasure(measure)`: the user chose another measure for the marks. */
  constructor(root, { onmeasure }) {
    this.#root = root;
    const choice = element("select", ...MEASURES.map((measure) => element("option", measure)));
    choice.setAttribute("aria-label", "Marks show");
    choice.addEventListener("change", () => {
      this.#legend.replaceChildren(legend(choice.value));
      onmeasure(choice.value);
    });
    const save = classed("button", "quiet", "Save tokens as CSV");
    save.type = "button";
    save.addEventListener("click", () => this.#save());
    this.#legend.append(legend(MEASURES[0]));
    put(root, this.#curves, choice, this.#legend, this.#message, save);
  }

  say(message) {
    this.#message.textContent = message;
  }

  /** Updates the curves and the table; parameters as of tokenTable(). */
  show(text, units, written, arrival) {
    this.#table = tokenTable(text, units, written, arrival);
    const surprises = this.#table.map(({ token }) => surprise(token));
    const known = surprises.filter((value) => value !== null);
    if (known.length < 2) return this.#curves.replaceChildren();
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    const speeds = rates(this.#table);
    const fastest = Math.max(...speeds.filter(Boolean));
    const label = `surprise: mean ${bits(mean)}, highest ${bits(Math.max(...known))}`;
    const speed = fastest > 0 ? `; tokens/s: up to ${Math.round(fastest)}` : "";
    const picture = curves([["surprise", surprises], ["speed", speeds]]);
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", `Along the text, ${label}${speed}`);
    const caption = element("figcaption", element("span", label), classed("span", "speed", speed.slice(2)));
    this.#curves.replaceChildren(picture, caption);
  }

  #save() {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([csv(this.#table)], { type: "text/csv" }));
    link.download = "tokens.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

// One curve for each list of values, scaled from 0 to its maximum, with gaps at unknown values.
function curves(lists) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  for (const [name, all] of lists) {
    const values = binned(all, BINS);
    const highest = Math.max(...values);
    const x = (index) => ((index * WIDTH) / Math.max(values.length - 1, 1)).toFixed(1);
    const y = (value) => (HEIGHT - 1 - ((HEIGHT - 2) * value) / (highest || 1)).toFixed(1);
    const starts = (index) => index === 0 || values[index - 1] === null;
    const points = values.map((value, index) => value !== null && `${starts(index) ? "M" : "L"}${x(index)} ${y(value)}`);
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    path.setAttribute("d", points.filter(Boolean).join(""));
    svg.append(path);
  }
  return svg;
}
