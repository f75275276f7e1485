"use strict";
// Filter the rows by their text. Without this script, the page shows all rows.
(() => {
  const rows = [...document.querySelectorAll(".row")];
  const search = document.getElementById("search");
  if (!search) return;
  const split = document.getElementById("split"), found = document.getElementById("found");
  const more = document.getElementById("more");
  // The line end signs are not part of the text.
  const nodes = rows.map(row => {
    const all = [], walker = document.createTreeWalker(row, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) if (walker.currentNode.parentNode.tagName !== "EM") all.push(walker.currentNode);
    return all;
  });
  const fold = text => [...text].map(c => c.toLowerCase().length === c.length ? c.toLowerCase() : c).join("");
  const texts = nodes.map(all => fold(all.map(node => node.data).join("")));
  const STEP = 20;
  let limit = STEP;

  function ranges(index, wanted) {
    const out = [];
    let at = texts[index].indexOf(wanted), node = 0, before = 0;
    const place = offset => {
      while (before + nodes[index][node].data.length < offset) before += nodes[index][node++].data.length;
      return [nodes[index][node], offset - before];
    };
    while (at >= 0 && out.length < 200) {
      const range = new Range();
      range.setStart(...place(at));
      range.setEnd(...place(at + wanted.length));
      out.push(range);
      at = texts[index].indexOf(wanted, at + wanted.length);
    }
    return out;
  }

  function update() {
    const wanted = fold(search.value.trim()), hits = [];
    let number = 0;
    rows.forEach((row, index) => {
      const fits = (!split.value || row.dataset.split === split.value) && texts[index].includes(wanted);
      number += fits;
      row.hidden = !fits || number > limit;
      if (!row.hidden && wanted) hits.push(...ranges(index, wanted));
    });
    const total = `${rows.length} ${rows.length === 1 ? "row" : "rows"} on this page`;
    const all = wanted || split.value ? `${number} of ${total}` : total;
    found.textContent = number > limit ? `${all}, the first ${limit} shown` : all;
    more.parentNode.hidden = number <= limit;
    if (window.Highlight && CSS.highlights) CSS.highlights.set("found", new Highlight(...hits));
  }

  const restart = () => { limit = STEP; update(); };
  search.addEventListener("input", restart);
  split.addEventListener("change", restart);
  search.form.addEventListener("submit", event => event.preventDefault());
  more.addEventListener("click", () => { limit += STEP; update(); });
  search.form.hidden = false;
  update();
})();
