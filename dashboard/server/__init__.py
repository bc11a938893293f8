"""server: the dashboard's web server, which reads run directories and never calls a driver.

serving.py        the process of a dashboard
app.py            routes, the event stream, and libraries from installed wheels
safety.py         token, Host, Origin, content security policy
export.py         one run as a single HTML file
"""
