"""server: the address of the dashboard. It reads run directories and never asks a driver.

app.py            addresses and what each answers
safety.py         token, Host, Origin, content-security policy
event_stream.py   tells pages which parts of which run have changed
"""
