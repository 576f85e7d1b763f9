function (id, data) {
  // The same figure may be shown twice on a page: each copy is started once, under its own name.
  let copies = document.querySelectorAll(`#${id}[data-on], [data-copy="${id}"]`).length;
  for (const root of document.querySelectorAll(`#${id}:not([data-on])`)) {
    root.dataset.on = "1";
    if (copies) { root.id = `${id}-${copies}`; root.dataset.copy = id; }
    copies += 1;
    start(root);
  }

  function start(root) {
    const sliders = [...root.querySelectorAll("input")], rows = [...root.querySelectorAll("tbody tr")];
    const say = root.querySelector("[aria-live]"), percent = (tenths) => `${(tenths / 10).toFixed(1)} %`;
    root.querySelector(".tv-knobs").hidden = false;

    function draw() {
      let at = 0;
      sliders.forEach((slider, k) => {
        const choice = data.knobs[k][+slider.value];
        at = at * data.knobs[k].length + +slider.value;
        slider.nextElementSibling.textContent = choice;
        slider.setAttribute("aria-valuetext", choice);
      });
      const [caption, shares, before] = data.frames[at];
      rows.forEach((row, r) => {
        const [, was, now, bars] = row.cells, cut = shares[r] < 0;
        row.classList.toggle("tv-cut", cut);
        was.textContent = percent(data.befores[before][r]);
        now.textContent = cut ? "cut" : percent(shares[r]);
        bars.children[0].style.width = percent(data.befores[before][r]).replace(" ", "");
        bars.children[1].style.width = cut ? "0" : percent(shares[r]).replace(" ", "");
      });
      say.textContent = caption;
    }
    for (const slider of sliders) slider.addEventListener("input", draw);
    draw();
  }
}
