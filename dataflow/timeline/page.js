"use strict"
// Draws the chart of the page's data, which page.py describes, and steers it by pointer and keys.

const timeline = (() => {
  const $ = (id) => document.getElementById(id)
  const data = JSON.parse($("data").textContent)
  const chart = $("chart"), tip = $("tip"), critical = $("critical")
  const LEFT = 112, RIGHT = 12, AXIS = 40 // pixels: names of rows, beside the plot, below it
  const PATH = "#E0007A" // no stage has this colour
  const BAND = ["#F6D58D", "#84651C"]
  const dark = matchMedia("(prefers-color-scheme: dark)")

  const view = { from: 0, to: data.length } // seconds
  const seen = {} // what the last frame shows
  let pen, look, pointer = null, pointed = null, waiting = false

  const wide = () => chart.clientWidth - LEFT - RIGHT
  const scale = () => wide() / (view.to - view.from)
  const place = (second) => LEFT + (second - view.from) * scale()
  const second = (x) => view.from + (x - LEFT) / scale()
  const visible = ({ x }) => x[1] >= view.from && x[0] <= view.to
  const box = ({ x, y }) => [place(x[0]), y[0], Math.max(1, (x[1] - x[0]) * scale()), y[1] - y[0]]

  // --- drawing ------------------------------------------------------------------------------------------

  function theme() {
    const css = getComputedStyle(document.documentElement)
    look = { at: dark.matches ? 1 : 0 }
    for (const name of ["ink", "faint", "edge", "hatch"]) look[name] = css.getPropertyValue("--" + name)
    const tile = Object.assign(document.createElement("canvas"), { width: 7, height: 7 }), line = tile.getContext("2d")
    line.strokeStyle = look.hatch
    for (const x of [-7, 0, 7]) line.stroke(new Path2D(`M${x} 7L${x + 7} 0`))
    look.hatched = chart.getContext("2d").createPattern(tile, "repeat")
    later()
  }

  // Draws once before the next frame, however much has changed.
  function later() {
    if (waiting) return
    waiting = true
    requestAnimationFrame(() => { waiting = false; draw() })
  }

  function draw() {
    if (wide() <= 0) return
    const ratio = devicePixelRatio || 1, high = data.height + AXIS
    chart.style.height = high + "px"
    chart.width = Math.round(chart.clientWidth * ratio)
    chart.height = Math.round(high * ratio)
    pen = chart.getContext("2d")
    pen.scale(ratio, ratio)
    pen.font = "11px system-ui, sans-serif"
    pen.textBaseline = "middle"
    seen.labels = []
    axis()
    for (const { name, top, bottom } of data.rows) text(name, LEFT - 8, (top + bottom) / 2, look.ink, "right", LEFT - 12)
    for (const { name, y } of data.runs) text(name, 4, y, look.ink, "left")
    pen.save()
    pen.beginPath()
    pen.rect(LEFT, 0, wide(), data.height)
    pen.clip()
    data.bands.forEach(band)
    waits()
    bars()
    if (critical.checked) path()
    for (const { x, top, bottom } of data.gaps) line(place(x), top, place(x), bottom, look.ink, [5, 2])
    pen.restore()
  }

  function text(words, x, y, colour, align = "center", room = undefined) {
    pen.fillStyle = colour
    pen.textAlign = align
    pen.fillText(words, x, y, room)
  }

  function line(x, y, toX, toY, colour, dash = []) {
    pen.strokeStyle = colour
    pen.setLineDash(dash)
    pen.stroke(new Path2D(`M${x} ${y}L${toX} ${toY}`))
    pen.setLineDash([])
  }

  function axis() {
    const least = (view.to - view.from) / Math.max(1, wide() / 90), power = 10 ** Math.floor(Math.log10(least))
    const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least)
    const digits = Math.max(0, -Math.floor(Math.log10(size)))
    for (let at = Math.ceil(view.from / size) * size; at <= view.to; at += size) {
      line(place(at), 0, place(at), data.height + 4, look.edge)
      text(at.toFixed(digits), place(at), data.height + 13, look.faint)
    }
    line(LEFT, data.height, LEFT + wide(), data.height, look.faint)
    text("seconds from the first task", LEFT + wide() / 2, data.height + 30, look.faint)
  }

  function band({ y: [top, bottom], points, most }) {
    const high = (level) => bottom - level / most * (bottom - top)
    pen.fillStyle = BAND[look.at]
    pen.beginPath()
    pen.moveTo(place(points[0][0]), bottom)
    points.forEach(([at, level], i) => {
      pen.lineTo(place(at), high(points[Math.max(0, i - 1)][1]))
      pen.lineTo(place(at), high(level))
    })
    pen.lineTo(place(points.at(-1)[0]), bottom)
    pen.fill()
    text(`at most ${most} in flight`, LEFT + 3, bottom - 6, look.ink, "left")
  }

  function waits() {
    seen.waits = data.waits.filter(visible)
    for (const wait of seen.waits) {
      pen.fillStyle = data.causes[wait.cause][look.at]
      pen.fillRect(...box(wait))
      pen.fillStyle = look.hatched
      pen.fillRect(...box(wait))
      label(wait, [wait.words, wait.cause], look.ink)
    }
  }

  // Writes the first of some words for which the visible part of a bar has room.
  function label({ x, y }, words, colour) {
    if (y[1] - y[0] < 11) return
    const from = Math.max(x[0], view.from), to = Math.min(x[1], view.to)
    const fits = words.find((w) => pen.measureText(w).width + 4 < (to - from) * scale())
    if (!fits) return
    text(fits, place((from + to) / 2), (y[0] + y[1]) / 2 + 0.5, colour)
    seen.labels.push(fits)
  }

  function bars() {
    seen.bars = data.bars.filter(visible)
    const onPath = critical.checked ? new Set(data.path.map((bar) => bar.task)) : null
    for (const bar of seen.bars) {
      const [x, y, w, h] = box(bar), pale = onPath && !onPath.has(bar.task), colours = data.stages[bar.stage]
      pen.globalAlpha = pale ? 0.25 : 1
      pen.fillStyle = colours[look.at]
      pen.fillRect(x, y, w > 3 ? w - 1 : w, h)
      pen.globalAlpha = 1
      if (w > 8) label(bar, [bar.label], pale ? look.faint : colours[2])
    }
  }

  function path() {
    pen.lineWidth = 2.5
    let before = null
    for (const bar of data.path) {
      const [x, y, w, h] = box(bar), middle = y + h / 2
      if (before && before.x <= bar.x[0] + 1e-3) line(place(before.x), before.y, x, middle, PATH)
      before = { x: bar.x[1], y: middle }
      if (!visible(bar)) continue
      pen.fillStyle = data.stages[bar.stage][look.at]
      pen.fillRect(x, y, w, h)
      pen.strokeStyle = PATH
      pen.strokeRect(x, y, w, h)
    }
    pen.lineWidth = 1
  }

  // --- what is pointed at ---------------------------------------------------------------------------------

  function under(x, y) {
    if (x < LEFT || x > LEFT + wide()) return null
    const at = second(x), covers = (item) => item.x[0] <= at + 1 / scale() && item.x[1] >= at - 1 / scale() &&
      item.y[0] <= y && item.y[1] >= y
    return data.gaps.find((gap) => Math.abs(place(gap.x) - x) <= 5 && gap.top <= y && gap.bottom >= y)
      ?? seen.bars.findLast(covers) ?? seen.waits.findLast(covers) ?? flight(at, y) ?? null
  }

  function flight(at, y) {
    const found = data.bands.find((b) => b.y[0] <= y && b.y[1] >= y)
    const point = found && found.points.findLast(([time]) => time <= at)
    return point ? { tip: `${found.head}${point[1]} reward requests in flight\nat\t${at.toFixed(2)} s\nat most\t${found.most}` }
      : undefined
  }

  function point(event) {
    const corner = chart.getBoundingClientRect()
    pointer = event && event.clientX - corner.left
    pointed = event && under(pointer, event.clientY - corner.top)
    chart.style.cursor = pointed?.address ? "pointer" : ""
    tip.hidden = !pointed
    if (!pointed) return
    const [head, ...facts] = pointed.tip.split("\n")
    const bold = Object.assign(document.createElement("b"), { textContent: head })
    tip.replaceChildren(bold, ...(facts.length ? ["\n" + facts.join("\n")] : []))
    const { width, height } = tip.getBoundingClientRect()
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px"
    tip.style.top = (event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14) + "px"
  }

  // --- moving ---------------------------------------------------------------------------------------------

  function show(from, to) {
    const least = Math.min(data.length, 1e-3), long = Math.min(data.length, Math.max(least, to - from))
    view.from = Math.max(0, Math.min(from, data.length - long))
    view.to = view.from + long
    later()
  }

  const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from))

  function zoom(factor) {
    const at = pointer === null ? (view.from + view.to) / 2 : second(Math.min(LEFT + wide(), Math.max(LEFT, pointer)))
    show(at - (at - view.from) * factor, at + (view.to - at) * factor)
  }

  const KEYS = {
    w: () => zoom(0.75), s: () => zoom(1 / 0.75), a: () => pan(-0.15), d: () => pan(0.15),
    arrowleft: () => pan(-0.15), arrowright: () => pan(0.15), 0: () => show(0, data.length),
  }

  chart.addEventListener("pointermove", point)
  chart.addEventListener("pointerleave", () => point(null))
  chart.addEventListener("wheel", (event) => {
    event.preventDefault()
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / 1000)
    else zoom(1.0015 ** event.deltaY)
  }, { passive: false })
  chart.addEventListener("pointerdown", (down) => {
    const was = { ...view }
    let far = false
    chart.setPointerCapture(down.pointerId)
    chart.onpointermove = (event) => {
      far ||= Math.abs(event.clientX - down.clientX) > 3
      const moved = (event.clientX - down.clientX) / scale()
      if (far) show(was.from - moved, was.to - moved)
    }
    chart.onpointerup = chart.onpointercancel = () => {
      chart.onpointermove = chart.onpointerup = chart.onpointercancel = null
      if (!far && pointed?.address) open(pointed.address, "samples")
    }
  })
  for (const button of document.querySelectorAll("button.go")) {
    button.addEventListener("click", () => {
      const from = Number(button.dataset.from), to = Number(button.dataset.to), around = Math.max(to - from, 0.05)
      show(from - 2 * around, to + 2 * around)
      chart.scrollIntoView({ block: "nearest" })
    })
  }
  addEventListener("keydown", (event) => {
    const act = KEYS[event.key.toLowerCase()]
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return
    event.preventDefault()
    act()
  })
  critical.addEventListener("change", later)
  dark.addEventListener("change", theme)
  new ResizeObserver(later).observe(chart)
  theme()
  draw()
  document.documentElement.dataset.ready = "yes"
  return { data, view, seen, place, show }
})()
