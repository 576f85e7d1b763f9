function (id, data) {
  const CHAR = 7.5, SMALL = 5.9, HIGH = 28, TALL = 40, GAP = 6, PAUSE = 1800;
  const esc = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const make = (tag, props, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };
  const rowsOf = (i) => data.frames[i][1].map((r) => data.rows[r]);
  const named = ([text, kind, note]) => [text, kind && data.kinds[kind][0], note].filter(Boolean).join(" ");

  // The layout is the same for every frame, so that nothing jumps: the width of a label, and under
  // each heading the width of one column and the height of a cell.
  let labelWidth = 0, total = 0;
  const units = {}, heights = {};
  data.frames.forEach((_, i) => {
    let part = "";
    for (const [label, cells] of rowsOf(i)) {
      if (!cells) { part = label; continue; }
      labelWidth = Math.max(labelWidth, label.length * CHAR + 14);
      for (const cell of cells) {
        if (!cell) continue;
        const [text, , note = "", span = 1] = cell;
        const width = Math.max(text.length * CHAR, note.length * SMALL) + 10;
        units[part] = Math.max(units[part] || 26, width / span);
        heights[part] = note ? TALL : heights[part] || HIGH;
      }
    }
  });

  // Where each row of a frame lies; a row longer than `columns` goes on in the line below.
  function lay(i) {
    const boxes = [];
    let part = "", y = 2;
    rowsOf(i).forEach(([label, cells, note], r) => {
      if (!cells) {
        part = label;
        y += boxes.length ? GAP : 0;
        boxes.push({ heading: label, x: 0, y: y + 14 });
        y += 24;
        return;
      }
      const unit = units[part] || 26, high = heights[part] || HIGH;
      const row = { label, note, y, high, cells: [] };
      let column = 0;
      cells.forEach((cell, c) => {
        const span = (cell && cell[3]) || 1;
        if (column && column + span > data.columns) { column = 0; y += high + 3; }
        if (cell) row.cells.push({ cell, name: `${r}.${c}`, x: labelWidth + column * unit, y, width: span * unit - 3, high });
        column += span;
      });
      row.end = labelWidth + column * unit + 6;
      row.last = y;
      total = Math.max(total, row.end + (note ? note.length * 6.4 : 0));
      y += high + GAP;
      boxes.push(row);
    });
    return { boxes, bottom: y };
  }
  const frames = data.frames.map((_, i) => lay(i));
  const deepest = Math.max(...frames.map((frame) => frame.bottom));

  // The cells that frame i changed, as "row.cell" names: those that the row of that name did not hold
  // one frame ago. A queue that moves up therefore stays quiet, and of equal cells the last are new.
  function changed(i) {
    const stock = {}, fresh = new Set();
    const each = (n, visit) => {
      let part = "";
      rowsOf(n).forEach(([label, cells], r) => {
        if (!cells) part = label;
        else cells.forEach((cell, c) => cell && visit(JSON.stringify([part, label, cell]), `${r}.${c}`));
      });
    };
    if (i === 0) return fresh;
    each(i - 1, (key) => { stock[key] = (stock[key] || 0) + 1; });
    each(i, (key, name) => { if (stock[key]) stock[key] -= 1; else fresh.add(name); });
    return fresh;
  }

  const text = (x, y, words, more) => `<text x="${x}" y="${y}" ${more}>${esc(words)}</text>`;
  const PLAIN = ["", "none", "#7a828e", "", ""];

  function box(uid, { cell: [words, kind, note], x, y, width, high }, isNew) {
    const [, fill, ink, pattern, dash] = kind ? data.kinds[kind] : PLAIN;
    const frame = `x="${x}" y="${y}" width="${width}" height="${high}" rx="3"`;
    // On a fill the text is dark in every theme, with a halo that keeps the pattern off the letters.
    const colour = fill === "none" ? 'fill="currentColor"'
      : `fill="#14161a" stroke="${fill}" stroke-width="3" paint-order="stroke" stroke-linejoin="round"`;
    const middle = `text-anchor="middle" ${colour}`;
    const ring = (grow, stroke, size) => `<rect x="${x - grow}" y="${y - grow}" width="${width + 2 * grow}" `
      + `height="${high + 2 * grow}" rx="${3 + grow}" fill="none" stroke="${stroke}" stroke-width="${size}"/>`;
    return `<g${isNew ? ' class="tv-changed"' : ""}><title>${esc(named([words, kind, note]))}</title>`
      + `<rect ${frame} fill="${fill}"/>`
      + (pattern ? `<rect ${frame} fill="url(#${uid}-${kind})"/>` : "")
      + `<rect ${frame} fill="none" stroke="${ink}" stroke-dasharray="${dash}"/>`
      + (isNew ? ring(-1, "#14161a", 2) + ring(0.7, "currentColor", 1.6) : "")
      + text(x + width / 2, y + (note ? 17 : high / 2 + 4.5), words, middle)
      + (note ? text(x + width / 2, y + 32, note, `font-size="9.8" ${middle}`) : "")
      + "</g>";
  }

  function legend(uid, top, anyNew) {
    let x = 2, y = top + 10, out = "";
    const items = Object.entries(data.kinds).map(([kind, [name]]) => ({ kind, name }));
    if (anyNew) items.push({ kind: "", name: "thick border: changed", isNew: true });
    for (const { kind, name, isNew } of items) {
      const width = 34 + name.length * 6.6;
      if (x > 2 && x + width > Math.max(total, 560)) { x = 2; y += 22; }
      out += box(uid, { cell: ["", kind, ""], x, y, width: 20, high: 15 }, isNew)
        + text(x + 26, y + 12, name, 'font-size="11.5" fill="currentColor"');
      x += width + 8;
    }
    return [out, y + 20];
  }

  function picture(uid, i) {
    const [keys, bottom] = legend(uid, deepest, data.frames.length > 1);
    const fresh = changed(i), patterns = Object.entries(data.kinds).map(([kind, [, , ink, path]]) =>
      `<pattern id="${uid}-${kind}" width="8" height="8" patternUnits="userSpaceOnUse">`
      + `<path d="${path}" stroke="${ink}" stroke-opacity=".38" stroke-width="1.2" fill="none"/></pattern>`);
    const said = [];
    let out = "";
    for (const row of frames[i].boxes) {
      if (row.heading !== undefined) {
        said.push(`${row.heading}:`);
        out += text(0, row.y, row.heading, 'font-size="12.5" font-weight="700" fill="currentColor"');
        continue;
      }
      out += text(0, row.y + row.high / 2 + 4.5, row.label, 'fill="currentColor"');
      for (const spot of row.cells) out += box(uid, spot, fresh.has(spot.name));
      if (row.note) out += text(row.end, row.last + row.high / 2 + 4, row.note, 'font-size="11.5" fill="currentColor"');
      said.push(`${row.label}: ${row.cells.map((spot) => named(spot.cell)).join(", ") || "empty"}${row.note ? `; ${row.note}` : ""}.`);
    }
    const width = Math.ceil(Math.max(total, 560)) + 2;
    return `<svg role="img" aria-label="${esc(said.join(" "))}" viewBox="0 0 ${width} ${bottom}" width="${width}" `
      + `style="min-width:${Math.min(width, Math.max(300, Math.round(width * 0.7)))}px" `
      + `font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace" font-size="12.2">`
      + `<defs>${patterns.join("")}</defs><g class="tv-cells">${out}</g>${keys}</svg>`;
  }

  function start(root, uid) {
    let now = 0, timer = null;
    const last = data.frames.length - 1;
    const button = (label, act) => make("button", { type: "button", textContent: label, onclick: act });
    const view = make("div", { className: "tv-view", tabIndex: 0 });
    view.setAttribute("role", "group");
    view.setAttribute("aria-label", "Picture. The left and right arrow keys step through it.");
    const say = make("div", { className: "tv-say" });
    say.setAttribute("aria-live", "polite");
    const back = button("Previous", () => show(now - 1));
    const play = button("Play", () => (timer ? stop() : run()));
    const next = button("Next", () => show(now + 1));
    const slide = make("input", { type: "range", min: 0, max: last, step: 1, oninput: () => show(+slide.value) });
    slide.setAttribute("aria-label", "Step");
    const count = make("span", { className: "tv-count" });

    function stop() { clearInterval(timer); timer = null; play.textContent = "Play"; }
    function run() {
      if (now === last) draw(0);
      play.textContent = "Pause";
      timer = setInterval(() => (root.isConnected && now < last ? draw(now + 1) : stop()), PAUSE);
    }
    function show(i) { stop(); draw(Math.min(last, Math.max(0, i))); }
    function draw(i) {
      now = i;
      const [caption, , note] = data.frames[i];
      view.innerHTML = picture(uid, i);
      say.replaceChildren(caption, ...(note ? [make("small", { textContent: note })] : []));
      slide.value = i;
      slide.setAttribute("aria-valuetext", `step ${i + 1} of ${last + 1}`);
      count.textContent = `${i + 1} / ${last + 1}`;
      // aria-disabled, not disabled: a disabled button would drop the keyboard's focus.
      back.setAttribute("aria-disabled", i === 0);
      next.setAttribute("aria-disabled", i === last);
    }
    root.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      show(to);
    });
    const story = make("ol", { className: "tv-print" }, ...data.frames.map(([caption]) => make("li", { textContent: caption })));
    const bar = make("div", { className: "tv-bar", hidden: !last }, back, play, next, slide, count);
    root.append(view, say, bar, story);
    draw(0);
  }

  // The same figure may be shown twice on a page: each copy is started once, under its own name.
  let copies = document.querySelectorAll(`#${id}[data-on], [data-copy="${id}"]`).length;
  for (const root of document.querySelectorAll(`#${id}:not([data-on])`)) {
    root.dataset.on = "1";
    if (copies) { root.id = `${id}-${copies}`; root.dataset.copy = id; }
    copies += 1;
    start(root, root.id);
  }
}
