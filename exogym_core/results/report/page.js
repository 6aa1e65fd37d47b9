// Curves that can be aligned, zoomed and switched, and what links carried. Names are text, never markup.
(() => {
  "use strict";
  document.documentElement.classList.add("js");
  const { curves: told, use, trace } = JSON.parse(document.getElementById("data").textContent);
  const ALIGNMENTS = { time: "virtual time", steps: "steps", bytes: "sent by a worker" };

  // --- small things ---------------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  function swatch(colour, dash) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const set = (target, all) => Object.entries(all).forEach(([name, value]) => target.setAttribute(name, value));
    set(svg, { width: 22, height: 10, "aria-hidden": "true" });
    set(line, { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash.join(" ") });
    svg.append(line);
    return svg;
  }

  const number = (value, digits = 4) => {
    if (value === null || value === undefined) return "";
    return String(Number(value.toPrecision(digits))).replace("e+", "e");
  };
  const scaled = (value, units, digits) => {
    const [size, unit] = units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
    return `${number(value / size, digits)} ${unit}`;
  };
  const seconds = (value, digits = 4) =>
    value === 0 ? "0 s" : scaled(value, [[172800, "d"], [7200, "h"], [300, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "us"]], digits);
  const bytes = (value, digits = 4) =>
    value === 0 ? "0 B" : scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]], digits);
  const rate = (value, digits = 4) =>
    value === 0 ? "0" : scaled(value, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"], [1, "bit/s"]], digits);
  const WRITE = { time: seconds, steps: number, bytes };

  /** Round numbers between two positive ones, so few that they can be read. */
  function logTicks(least, most, count) {
    const sets = [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]];
    let ticks = [];
    for (const steps of sets) {
      ticks = [];
      for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
        for (const step of steps) {
          const tick = Number((step * 10 ** power).toPrecision(3));
          if (tick >= least * 0.999 && tick <= most * 1.001) ticks.push(tick);
        }
      }
      if (ticks.length <= count) break;
    }
    const stride = Math.ceil(ticks.length / count);
    return ticks.filter((_, position) => position % stride === 0);
  }

  /** uPlot wants places that rise: those that stand still are moved by what nobody sees. */
  function rising(places) {
    const tiny = Math.max(1e-12, (places[places.length - 1] || 1) * 1e-9);
    let last = -Infinity;
    return places.map((place) => (last = place > last ? place : last + tiny));
  }

  // --- a chart: curves over one axis, a legend that switches them, hover, zoom -----------------------------

  /**
   * @param {HTMLElement} parent where it is put
   * @param {object} options
   *   curves: [{name, colour, dash, shown, x, y, least, most, stepped}]
   *   label: what it shows, for those who do not see it; x, y: {label, write, log}
   *   shade(context, plot): drawn behind the curves; remark(x): added to the line below; target: a level to show
   */
  class Chart {
    constructor(parent) {
      this.plotted = element("div", { class: "plot", tabindex: "0", role: "group" });
      this.readout = element("p", { class: "readout" });
      this.legend = element("div", { class: "legend", role: "group", "aria-label": "Curves to show" });
      parent.append(this.plotted, this.readout, this.legend);
      this.hidden = new Map();
      this.chart = null;
      new ResizeObserver(() => this.chart && this.chart.setSize(this.size())).observe(this.plotted);
      this.plotted.addEventListener("keydown", (event) => this.key(event));
    }

    size() {
      const width = Math.max(240, this.plotted.clientWidth);
      return { width, height: width < 560 ? 330 : 430 };
    }

    show(options) {
      this.options = options;
      this.plotted.setAttribute("aria-label", `${options.label}. Arrow keys read values, plus and minus zoom, 0 shows all.`);
      if (this.chart) this.chart.destroy();
      this.write(null);
      const { curves } = options;
      const tables = curves.map((curve) => {
        const x = rising(curve.x);
        const keep = (values) => values.map((value) => (options.y.log && !(value > 0) ? null : value));
        return [x, keep(curve.y), ...(curve.least ? [keep(curve.least), keep(curve.most)] : [])];
      });
      const series = [{}];
      const bands = [];
      this.places = curves.map((curve) => {
        const at = series.length;
        const show = this.isShown(curve);
        series.push({
          label: curve.name, stroke: curve.colour, width: 2, dash: curve.dash, spanGaps: true, show,
          paths: curve.stepped ? uPlot.paths.stepped({ align: -1 }) : undefined,
          points: { show: !curve.stepped && curve.x.length < 40, size: 5, fill: curve.colour },
        });
        if (curve.least) {
          for (const edge of ["least", "most"]) {
            series.push({ label: edge, stroke: curve.colour + "00", width: 0, spanGaps: true, show, points: { show: false } });
          }
          bands.push({ series: [at + 2, at + 1], fill: curve.colour + "2b" });
        }
        return at;
      });
      this.chart = new uPlot(this.uplotOptions(series, bands), uPlot.join(tables), this.plotted);
      this.draw_legend();
      this.enable_touch();
    }

    isShown(curve) {
      return this.hidden.has(curve.name) ? !this.hidden.get(curve.name) : curve.shown !== false;
    }

    uplotOptions(series, bands) {
      const { x, y, curves } = this.options;
      const ends = curves.map((curve) => curve.x[curve.x.length - 1]).filter((end) => end > 0);
      const linear = ends.length ? Number((Math.min(...ends) / 4).toPrecision(1)) : 1;
      const grid = { stroke: "#e3e6e8", width: 1 };
      const axis = { stroke: "#5b6168", grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
      const narrow = this.size().width < 560;
      const across = narrow ? 5 : 9;
      const xTicks = (_, __, least, most) => [...(least <= 0 ? [0] : []), ...logTicks(Math.max(least, linear), most, across)];
      return {
        ...this.size(),
        series, bands,
        padding: [12, narrow ? 14 : 24, 0, 0],
        legend: { show: false },
        focus: { alpha: 0.35 },
        scales: {
          x: { time: false, distr: x.log ? 4 : 1, asinh: linear, range: (_, least, most) => [least, most] },
          y: { distr: y.log ? 3 : 1, range: (plot, least, most) => this.yRange(least, most) },
        },
        axes: [
          { ...axis, label: x.label, labelFont: axis.font, labelSize: 24, size: 34, space: narrow ? 62 : 74,
            values: (_, splits) => splits.map((value) => x.write(value, 3)),
            ...(x.log ? { splits: xTicks, filter: (_, splits) => splits } : {}) },
          { ...axis, size: (_, values) => 14 + 6.6 * Math.max(4, ...(values || []).map((text) => text.length)), values: (_, splits) => splits.map((value) => y.write(value, 3)),
            ...(y.log ? { splits: (_, __, least, most) => logTicks(least, most, 8), filter: (_, splits) => splits } : {}) },
        ],
        cursor: {
          drag: { x: true, y: true, uni: 30, dist: 5 },
          focus: { prox: 24 },
          dataIdx: (plot, at, hovered) => this.nearest(plot, at, hovered),
          points: { size: 8, show: (plot, at) => this.places.includes(at) ? undefined : false },
        },
        hooks: {
          drawClear: [(plot) => this.options.shade && this.clipped(plot, this.options.shade)],
          draw: [(plot) => this.clipped(plot, (context) => this.draw_target(plot, context))],
          setCursor: [(plot) => this.write(plot)],
          setScale: [() => this.zoomed && this.zoomed()],
        },
      };
    }

    yRange(least, most) {
      if (least === null || most === null) return [this.options.y.log ? 0.1 : 0, 1];
      if (this.options.y.log) return least === most ? [least / 2, most * 2] : [least / 1.06, most * 1.06];
      const pad = (most - least || Math.abs(most) || 1) * 0.05;
      return [least >= 0 && least - pad < 0 ? 0 : least - pad, most + pad];
    }

    /** Of each curve the point nearest to the cursor, since not every curve has one at each place. */
    nearest(plot, at, hovered) {
      const values = plot.data[at];
      if (at === 0 || values[hovered] !== null && values[hovered] !== undefined) return hovered;
      let [before, after] = [hovered - 1, hovered + 1];
      while (before >= 0 && (values[before] === null || values[before] === undefined)) before--;
      while (after < values.length && (values[after] === null || values[after] === undefined)) after++;
      if (before < 0) return after < values.length ? after : hovered;
      if (after >= values.length) return before;
      const x = plot.data[0];
      return x[hovered] - x[before] <= x[after] - x[hovered] ? before : after;
    }

    clipped(plot, draw) {
      const { ctx: context, bbox } = plot;
      context.save();
      context.beginPath();
      context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      context.clip();
      draw(context, plot);
      context.restore();
    }

    draw_target(plot, context) {
      const { target } = this.options;
      if (!(target > 0)) return;
      const ratio = devicePixelRatio || 1;
      const level = plot.valToPos(target, "y", true);
      context.strokeStyle = context.fillStyle = "#5b6168";
      context.lineWidth = ratio;
      context.setLineDash([5 * ratio, 4 * ratio]);
      context.beginPath();
      context.moveTo(plot.bbox.left, level);
      context.lineTo(plot.bbox.left + plot.bbox.width, level);
      context.stroke();
      context.font = `${12 * ratio}px system-ui, sans-serif`;
      context.textAlign = "right";
      context.fillText(`target ${number(target)}`, plot.bbox.left + plot.bbox.width - 4 * ratio, level - 5 * ratio);
    }

    draw_legend() {
      const { curves, y } = this.options;
      this.values = curves.map((curve) => element("span", { class: "value" }, y.write(curve.y[curve.y.length - 1])));
      this.legend.replaceChildren(...curves.map((curve, position) => {
        const button = element("button", { type: "button", "aria-pressed": String(this.isShown(curve)) },
          swatch(curve.colour, curve.dash), element("span", { class: "name" }, curve.name), this.values[position]);
        button.addEventListener("click", () => {
          const show = !this.isShown(curve);
          this.hidden.set(curve.name, !show);
          button.setAttribute("aria-pressed", String(show));
          const at = this.places[position];
          for (let each = at; each <= at + (curve.least ? 2 : 0); each++) this.chart.setSeries(each, { show });
        });
        return button;
      }));
    }

    /** The line below: where the cursor is, and what the network did; values in the legend. */
    write(plot) {
      const { curves, x, y, remark } = this.options;
      const at = plot && plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null;
      this.readout.textContent = at === null ? "" : `at ${x.write(at)}${remark ? remark(at) : ""}`;
      (this.values || []).forEach((value, position) => {
        const series = curves[position];
        if (!series) return;
        const place = at === null ? null : plot.cursor.idxs[this.places[position]];
        const found = place === null || place === undefined ? null : plot.data[this.places[position]][place];
        value.textContent = y.write(found ?? series.y[series.y.length - 1]);
      });
    }

    get isZoomed() {
      if (!this.chart) return false;
      const { min, max } = this.chart.scales.x;
      const x = this.chart.data[0];
      return min > x[0] || max < x[x.length - 1];
    }

    /** [first, last] place on the screen. */
    get span() {
      return [this.chart.scales.x.min, this.chart.scales.x.max];
    }

    reset() {
      this.chart.setData(this.chart.data, true);
    }

    /** Zoom along x by a factor around a share of the width. */
    zoom(factor, share = 0.5) {
      const width = this.chart.over.clientWidth;
      const [left, right] = [share * width - (share * width) / factor, share * width + ((1 - share) * width) / factor];
      const x = this.chart.data[0];
      const bound = (place) => Math.min(Math.max(this.chart.posToVal(place, "x"), x[0]), x[x.length - 1]);
      const [min, max] = [bound(left), bound(right)];
      if (max > min) this.chart.setScale("x", { min, max });
    }

    key(event) {
      const plot = this.chart;
      const actions = {
        "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5), 0: () => this.reset(),
        ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
      };
      if (!plot || event.target !== this.plotted || !actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    }

    step(by) {
      const plot = this.chart;
      const width = plot.over.clientWidth;
      const left = Math.min(Math.max((plot.cursor.left < 0 ? 0 : plot.cursor.left) + (by * width) / 60, 0), width);
      plot.setCursor({ left, top: plot.over.clientHeight / 2 });
    }

    /** One finger reads, two zoom; up and down scrolls the page as ever. */
    enable_touch() {
      const over = this.chart.over;
      const fingers = new Map();
      let apart = 0;
      const place = (event) => event.clientX - over.getBoundingClientRect().left;
      over.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "touch") return;
        fingers.set(event.pointerId, place(event));
        apart = 0;
      });
      over.addEventListener("pointermove", (event) => {
        if (!fingers.has(event.pointerId)) return;
        fingers.set(event.pointerId, place(event));
        const at = [...fingers.values()];
        if (at.length === 1) this.chart.setCursor({ left: at[0], top: over.clientHeight / 2 });
        if (at.length !== 2) return;
        const now = Math.max(Math.abs(at[0] - at[1]), 10);
        if (apart) this.zoom(now / apart, (at[0] + at[1]) / 2 / over.clientWidth);
        apart = now;
      });
      for (const name of ["pointerup", "pointercancel"]) {
        over.addEventListener(name, (event) => fingers.delete(event.pointerId));
      }
    }
  }

  // --- what can be chosen ---------------------------------------------------------------------------------

  function choice(label, values, chosen, choose) {
    const group = element("div", { class: "choice", role: "group", "aria-label": label });
    const buttons = Object.entries(values).map(([value, text]) => {
      const button = element("button", { type: "button", "aria-pressed": String(value === chosen) }, text);
      button.addEventListener("click", () => {
        buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        choose(value);
      });
      return button;
    });
    group.append(...buttons);
    return group;
  }

  function toggle(text, isOn, change) {
    const button = element("button", { type: "button", "aria-pressed": String(isOn) }, text);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      change(on);
    });
    return button;
  }

  /** Grey where links or hosts were down or slow; a strategy's colour at the foot where ranks were away. */
  function shading(alignment, curves) {
    return (context, plot) => {
      const { bbox } = plot;
      const fill = (begin, end, colour, top, height) => {
        const [left, right] = [begin, end ?? plot.scales.x.max].map((place) => plot.valToPos(place, "x", true));
        context.fillStyle = colour;
        context.fillRect(left, top, Math.max(right - left, 1), height);
      };
      if (alignment === "time") {
        for (const [begin, end, share] of told.shade) fill(begin, end, `rgba(60, 66, 72, ${0.16 * (1 - share)})`, bbox.top, bbox.height);
      }
      const high = 7 * (devicePixelRatio || 1);
      for (const curve of curves) {
        for (const absence of curve.absences || []) {
          if (absence[alignment]) fill(...absence[alignment], curve.colour + "88", bbox.top + bbox.height - high, high);
        }
      }
    };
  }

  function remarks(alignment, curves) {
    return (at) => {
      const found = [];
      if (alignment === "time") {
        for (const { name, spans } of told.weather) {
          const span = spans.find(([begin, end]) => begin <= at && at < end);
          if (span) found.push(`${name}: ${span[2] === 0 ? "down" : `${Math.round(span[2] * 100)} % left`}`);
        }
      }
      for (const curve of curves) {
        const ranks = (curve.absences || [])
          .filter((each) => each[alignment] && each[alignment][0] <= at && at < (each[alignment][1] ?? Infinity))
          .map((each) => each.rank);
        if (ranks.length) found.push(`${curve.name}: without rank ${ranks.join(", ")}`);
      }
      return found.length ? `; ${found.join("; ")}` : "";
    };
  }

  // --- the curves -----------------------------------------------------------------------------------------

  function showCurves(section) {
    const state = { align: told.align, measure: Object.keys(told.measures)[0], logX: null, logY: true };
    const chart = new Chart(section);
    const tools = element("div", { class: "tools" });
    const reset = element("button", { type: "button", disabled: true }, "Show all");
    reset.addEventListener("click", () => chart.reset());
    chart.zoomed = () => { reset.disabled = !chart.isZoomed; };
    const farApart = (curves) => {
      const ends = curves.map((curve) => curve.x[curve.x.length - 1]).filter((end) => end > 0);
      return Math.max(...ends) > 12 * Math.min(...ends);
    };
    const logX = toggle("log x", false, (on) => { state.logX = on; draw(); });
    const logY = toggle("log y", true, (on) => { state.logY = on; draw(); });

    function draw() {
      const curves = told.curves
        .filter((each) => each.measures[state.measure] && each.measures[state.measure][state.align])
        .map((each) => {
          const { [state.align]: x, value: y, least, most } = each.measures[state.measure];
          return { ...each, x, y, least, most };
        });
      const isLog = state.logX ?? farApart(curves);
      logX.setAttribute("aria-pressed", String(isLog));
      chart.show({
        curves,
        label: `${told.measures[state.measure]} against ${ALIGNMENTS[state.align]}`,
        x: { label: ALIGNMENTS[state.align], write: WRITE[state.align], log: isLog },
        y: { write: number, log: state.logY },
        target: state.measure === "loss" ? told.target : null,
        shade: shading(state.align, curves),
        remark: remarks(state.align, curves),
      });
    }

    const alignments = Object.fromEntries(told.alignments.map((name) => [name, name]));
    tools.append(choice("Align by", alignments, state.align, (value) => { state.align = value; state.logX = null; draw(); }));
    if (Object.keys(told.measures).length > 1) {
      const select = element("select", { "aria-label": "What is shown" },
        ...Object.entries(told.measures).map(([name, text]) => element("option", { value: name }, text)));
      select.addEventListener("change", () => {
        state.measure = select.value;
        state.logY = select.value !== "accuracy";
        logY.setAttribute("aria-pressed", String(state.logY));
        draw();
      });
      tools.append(select);
    }
    tools.append(logX, logY, reset);
    section.querySelector("h2").after(tools);
    section.append(element("p", { class: "note" },
      "Drag to zoom, double-click or \u201cShow all\u201d to go back; names switch curves on and off. " +
      (told.curves.some((each) => each.runs > 1) ? "Lines are means over runs, bands go from the lowest to the highest. " : "") +
      (told.weather.length ? "Grey: a link or host was down or slow. " : "") +
      (told.curves.some((each) => each.absences.length) ? "Colour at the foot: ranks were away (first run). " : "") +
      (told.left_out ? `${told.left_out} more groups are in the table only. ` : "")));
    section.hidden = false;
    draw();
    return chart;
  }

  function showUse(section) {
    const known = told.curves.filter((each) => each.use);
    if (!known.length) return null;
    section.append(element("h2", {}, "Use of the network over time"));
    const tools = element("div", { class: "tools" });
    const chart = new Chart(section);
    const state = { what: "sent" };
    const draw = () => {
      const curves = known.filter((each) => each.use[state.what]).map((each) => ({
        ...each, x: [0, ...each.use.seconds], y: [each.use[state.what][0], ...each.use[state.what]], stepped: true,
      }));
      const ends = curves.map((curve) => curve.x[curve.x.length - 1]);
      chart.show({
        curves,
        label: "Bits per second that all workers sent, against virtual time",
        x: { label: ALIGNMENTS.time, write: seconds, log: Math.max(...ends) > 12 * Math.min(...ends) },
        y: { write: rate, log: false },
        shade: shading("time", curves),
        remark: remarks("time", curves),
      });
    };
    if (known.some((each) => each.use.wan)) {
      tools.append(choice("What is counted", { sent: "all workers", wan: "between regions" }, "sent", (value) => { state.what = value; draw(); }));
      section.insertBefore(tools, chart.plotted);
    }
    section.append(element("p", { class: "note" },
      "Payload that workers sent a second, means over sixtieths of each run (of the first, where there are several)."));
    draw();
    return chart;
  }

  // --- the network ----------------------------------------------------------------------------------------

  function showLinks(parent) {
    const names = Object.keys(use.links);
    const count = use.links[names[0]].length;
    const slider = element("input", { type: "range", min: 0, max: count - 1, value: 0, id: "instant" });
    const line = element("p", { class: "readout" });
    const colour = (share) => {
      // From quiet grey-blue over amber to red, by how much of a link was used.
      const stops = [[0xa9, 0xb7, 0xc2], [0xe6, 0x9f, 0x00], [0xb0, 0x1c, 0x1c]];
      const at = Math.min(Math.max(share, 0), 1) * 2;
      const [low, high] = at < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
      return `rgb(${low.map((value, channel) => Math.round(value + (high[channel] - value) * (at < 1 ? at : at - 1))).join(",")})`;
    };
    const draw = () => {
      const now = Number(slider.value);
      for (const link of document.querySelectorAll("svg .link")) {
        const shares = use.links[link.dataset.link];
        link.style.stroke = colour(shares ? shares[now] : 0);
      }
      const [busiest, share] = names.map((name) => [name, use.links[name][now]]).reduce((one, other) => (other[1] > one[1] ? other : one));
      const [begin, end] = [now * use.span_seconds, (now + 1) * use.span_seconds];
      line.textContent = `${seconds(begin, 3)} to ${seconds(end, 3)}: ` +
        (share > 0 ? `busiest is ${busiest.replace("->", " to ")} with ${Math.round(share * 100)} % of what it can carry` : "nothing is sent");
    };
    slider.addEventListener("input", draw);
    parent.append(element("label", { for: "instant" }, "What links carried, at: "), slider, line);
    parent.hidden = false;
    draw();
  }

  // --- the trace ------------------------------------------------------------------------------------------

  /** Hand the trace to Perfetto's page, which asks for no file of a server, and show the zoomed span there. */
  function openPerfetto(charts) {
    const text = document.getElementById("trace").textContent;
    const buffer = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
    const origin = "https://ui.perfetto.dev";
    const opened = window.open(origin);
    if (!opened) return;
    const asking = setInterval(() => opened.postMessage("PING", origin), 100);
    setTimeout(() => clearInterval(asking), 30000);
    window.addEventListener("message", function answered(event) {
      if (event.origin !== origin || event.source !== opened || event.data !== "PONG") return;
      clearInterval(asking);
      window.removeEventListener("message", answered);
      opened.postMessage({ perfetto: { buffer, title: document.title, fileName: trace } }, origin);
      const zoomed = charts.find((chart) => chart && chart.isZoomed && chart.options.x.label === ALIGNMENTS.time);
      const span = zoomed && zoomed.span;
      if (span) opened.postMessage({ perfetto: { timeStart: span[0], timeEnd: span[1], viewPercentage: 0.9 } }, origin);
    });
  }

  // --- the page -------------------------------------------------------------------------------------------

  const charts = [];
  const section = document.getElementById("curves");
  if (told) {
    charts.push(showCurves(section));
    const used = element("section", { id: "rates" });
    section.after(used);
    charts.push(showUse(used));
  }
  if (use && document.getElementById("use")) showLinks(document.getElementById("use"));
  const perfetto = document.getElementById("perfetto");
  if (perfetto && document.getElementById("trace")) {
    perfetto.hidden = false;
    perfetto.addEventListener("click", () => openPerfetto(charts));
  }
  const cues = () => {
    for (const cue of document.querySelectorAll(".cue")) {
      const table = cue.nextElementSibling;
      cue.classList.toggle("idle", table.scrollWidth <= table.clientWidth + 1);
    }
  };
  addEventListener("resize", cues);
  cues();
  window.netgym = { charts };
})();
