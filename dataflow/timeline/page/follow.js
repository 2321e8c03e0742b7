"use strict"
// Reloads the page when the server has a newer version; page.js restores the view.
const events = new EventSource("events")
events.onmessage = (event) => {
  if (event.data !== document.documentElement.dataset.version) {
    events.close()
    location.reload()
  }
}
