"""Many trials: sweep file -> plan -> segments on Ray Tune -> store -> answers."""
