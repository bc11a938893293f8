"""server: the address of the dashboard. It reads run directories and never asks a driver.

serving.py        the process of a dashboard, from its socket to its end
beside_run.py     the same, started by a run
app.py            addresses and what each answers
safety.py         token, Host, Origin, content-security policy
event_stream.py   tells pages which parts of which run have changed
vendored.py       script files that wheels of others carry
export.py         one run as one HTML file
"""
