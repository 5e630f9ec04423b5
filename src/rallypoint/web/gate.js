"use strict";
// The page has taken the token out of its address; when it is loaded again in the same tab, it comes here first.
{
  const kept = sessionStorage.getItem("rallypoint-token");
  if (location.search) sessionStorage.removeItem("rallypoint-token"); // that token was no good
  else if (kept) location.replace("/?token=" + encodeURIComponent(kept));
}
