// Tooltips, and what the scripts of charts share: numbers as text, ticks, elements, the data and colours of the page.

const kit = (() => {
  const digits = (value, count) => value.toLocaleString("en", { maximumSignificantDigits: count });
  const step = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999999) * power;
  };
  return {
    data: (id) => JSON.parse(document.getElementById(id).textContent),
    html: (parent, name, css, words) => {
      const made = document.createElement(name);
      if (css) made.className = css;
      if (words !== undefined) made.textContent = words;
      parent.appendChild(made);
      return made;
    },
    // The colours of the current theme, by name.
    colours: (names) => {
      const style = getComputedStyle(document.documentElement);
      return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
    },
    number: (value, format) => {
      if (value === null || value === undefined) return "-";
      if (format === "percent") return digits(100 * value, 3) + " %";
      if (format === "seconds" && value !== 0 && Math.abs(value) < 1) return digits(1000 * value, 3) + " ms";
      if (format === "seconds") return digits(value, 3) + " s";
      if (Number.isInteger(value)) return value.toLocaleString("en");
      return Math.abs(value) < 1e-4 ? value.toExponential(2) : digits(value, 4);
    },
    // Round values from low to high, about this many, and the decimals that distinguish them.
    ticks: (low, high, about) => {
      const by = step((high - low) / about || 1), values = [];
      for (let k = Math.ceil(low / by - 1e-9); k * by <= high + by * 1e-6; k++)
        values.push(Number((k * by).toPrecision(12)));
      return { values, decimals: Math.max(0, -Math.floor(Math.log10(by) + 1e-9)) };
    },
  };
})();

(() => {
  const tip = document.getElementById("tip");
  document.addEventListener("mousemove", (event) => {
    const marked = event.target.closest("[data-tip]");
    tip.style.display = marked ? "block" : "none";
    if (!marked) return;
    tip.textContent = marked.dataset.tip;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
    const top = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  });
})();
