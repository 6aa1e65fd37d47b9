// A chart: curves over one axis, a legend that switches them, hover, zoom.

/**
 * @param {HTMLElement} parent where it is put
 * @param {object} options
 *   curves: [{name, colour, dash, shown, x, y, least, most, stepped}]
 *   label: accessible name; x, y: {label, write, log}
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
    const ends = curves.map((curve) => curve.x.at(-1)).filter((end) => end > 0);
    const linear = ends.length ? Number((Math.min(...ends) / 4).toPrecision(1)) : 1;
    const grid = { stroke: "#e3e6e8", width: 1 };
    const axis = { stroke: "#5b6168", grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
    const narrow = this.size().width < 560;
    const across = narrow ? 5 : 9;
    const xTicks = (_, __, least, most) => [...(least <= 0 ? [0] : []), ...logTicks(Math.max(least, linear), most, across)];
    // "2 min 30 s" needs more room than "50 s": labels ran into each other on a telephone.
    const room = (value) => 18 + 6.6 * x.write(value, 3).length;
    const labelSpace = (_, __, least, most) =>
      Math.max(narrow ? 62 : 74, ...[...Array(9).keys()].map((part) => room(least + (part / 8) * (most - least))));
    const apart = (plot, splits) => {
      let last = -Infinity;
      return splits.map((value) => {
        const at = plot.valToPos(value, "x");
        if (at - last < room(value)) return null;
        last = at;
        return value;
      });
    };
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
        { ...axis, label: x.label, labelFont: axis.font, labelSize: 24, size: 34, space: labelSpace,
          values: (_, splits) => splits.map((value) => (value === null ? "" : x.write(value, 3))),
          ...(x.log ? { splits: xTicks, filter: apart } : {}) },
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
    if (at === 0 || !isMissing(values[hovered])) return hovered;
    let [before, after] = [hovered - 1, hovered + 1];
    while (before >= 0 && isMissing(values[before])) before--;
    while (after < values.length && isMissing(values[after])) after++;
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
    this.values = curves.map((curve) => element("span", { class: "value" }, y.write(curve.y.at(-1))));
    this.legend.replaceChildren(...curves.map((curve, position) => {
      const content = [swatch(curve.colour, curve.dash), element("span", { class: "name" }, curve.name), this.values[position]];
      return toggle(content, this.isShown(curve), (show) => {
        this.hidden.set(curve.name, !show);
        const at = this.places[position];
        for (let each = at; each <= at + (curve.least ? 2 : 0); each++) this.chart.setSeries(each, { show });
      });
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
      const found = isMissing(place) ? null : plot.data[this.places[position]][place];
      value.textContent = y.write(found ?? series.y.at(-1));
    });
  }

  get isZoomed() {
    if (!this.chart) return false;
    const { min, max } = this.chart.scales.x;
    const x = this.chart.data[0];
    return min > x[0] || max < x.at(-1);
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
    const bound = (place) => Math.min(Math.max(this.chart.posToVal(place, "x"), x[0]), x.at(-1));
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
