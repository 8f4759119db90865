"""No machine to be had, or not allowed as many: stockouts, and quotas that look like them.

Data for the failure bank, in its grammar. Sources: the providers' own message texts and the issues
named.
"""

from __future__ import annotations

CAPACITY_SIGNATURES = r"""
== gce_stockout | root | certain
line VM instance .{0,80}is currently unavailable in the (?P<zone>[a-z0-9-]+) zone\. .{0,80}?request
  in the (?P<zones>[a-z0-9, -]+?) zone\(s\)
line zonesAvailable: *(?P<zones>[a-z0-9, -]+)
line ZONE_RESOURCE_POOL_EXHAUSTED
line does not have enough resources available to fulfill the request
line is currently unavailable in the (?P<zone>[a-z]+-[a-z]+\d-[a-z]) zone
line (?:REGION_)?RESOURCE_POOL_EXHAUSTED|GPU_STOCKOUT
line reason: *(?P<reason>stockout|resource_availability)
line GCE out of resources
also zonesAvailable: *(?P<zones>[a-z0-9][a-z0-9, -]*)
also (?:in the |zones?/|zone: *)'?(?P<zone>[a-z]+-[a-z]+\d-[a-z])\b
cause Stockout: the zone {zone?asked for} has no such machine now. It is capacity, not quota.
change place zone: {zone?the zone asked for} -> {zones?another zone that offers the machine}
change act flex-start, or spot, where waiting for a queue is acceptable
futile asking for more quota: nothing of it was used up
issue kubernetes/k8s.io#9834; skypilot-org/skypilot#831

== tpu_stockout | root | certain
line There is no more capacity in the zone \\?"?(?P<zone>[a-z]+-[a-z]+\d-[a-z])?
line (?:TPU|accelerator).{0,60}(?:no more|insufficient|not enough) capacity
line INTERRUPTED_BY_NO_CAPACITY|insufficientCapacity
cause Stockout of TPUs in the zone {zone?asked for}; code 8 (RESOURCE_EXHAUSTED) here is capacity,
  not memory and not quota.
change place zone: {zone?the zone asked for} -> another zone in which there is quota for this TPU
change act a queued resource (flex-start) or spot, or the same request later
futile a quota increase
issue hashicorp/terraform-provider-google#21243; dstackai/dstack#1397

== tpu_reserved_capacity | root | likely
line Insufficient reserved capacity|reserved capacity.{0,40}(?:insufficient|not enough|exhausted)
line \breservations?\b.{0,160}(?:not found|is not in zone|does not exist)
line Reservation not found
cause The request asked for reserved capacity, and there is no reservation (or it is used up).
change flag --reserved: on -> off (use --spot or flex-start where there is no reservation)
change act name the reservation of this project and zone, if there is one
futile other zones: a reservation is for one zone
issue skypilot-org/skypilot#4579

== qr_failed_or_suspended | fault | likely
line (?:queued[ -]resource|QueuedResource).{0,80}(?:state|STATE)\W{1,3}(?:FAILED|SUSPENDED
  |SUSPENDING)
line \b(?:SUSPENDED|FAILED)\b.{0,80}queued[ -]resource
cause The queued resource ended without a machine, and holds its quota until it is deleted.
change act delete the dead queued resource (--force), then ask again: a decision for a person
futile waiting: a failed or suspended request is never granted
issue marin-community/levanter#328

== flex_start_expired | root | likely
line (?:valid[- ]until|validUntil|request[- ]valid[- ]for).{0,80}(?:expired|exceeded|elapsed)
line resize request.{0,60}(?:timed out|expired|failed to provision)
cause The request waited as long as it was allowed to and got no capacity.
change flag --request-valid-for-duration: as it is -> longer (2 h at most), or another zone
futile a quota increase

== spot_preempted | root | certain
line compute\.instances\.preempted|Instance was preempted
line (?:instance|node|VM|TPU).{0,40}(?:has been|was|is being) preempted
line Server\.SpotInstanceTermination|Spot (?:Instance )?(?:interruption|termination) notice
line (?:state|status)\W{1,4}PREEMPTED\b
cause The provider took the spot machine back while it was running.
change act ask for the machine again, in another zone if need be; what was measured is void
change act on-demand or reserved machines, where an interruption is not acceptable
futile looking for a fault in the engine: its log ends because the machine did

== host_maintenance | root | likely
line compute\.instances\.(?:hostError|terminateOnHostMaintenance|hostMaintenance)
line Instance terminated (?:by|due to|during) (?:Compute Engine|host maintenance|maintenance)
cause The host under the machine failed or was maintained; machines with accelerators end then.
change act start the machine again; --maintenance-policy=TERMINATE is what accelerators need
futile changing the engine's flags

== ec2_stockout | root | certain
line do not have sufficient (?P<type>[\w.-]+) capacity in the Availability Zone you requested
  \((?P<zone>[a-z]+-[a-z]+-\d[a-z])\)(?:.{0,300}?choosing (?P<zones>[a-z0-9, -]+))?
line InsufficientInstanceCapacity|InsufficientHostCapacity|InsufficientReservedInstanceCapacity
line There is no Spot capacity available that matches your request
line capacity-not-available|InsufficientCapacityOnOutpost
cause Stockout of {type?the instance type} in the Availability Zone {zone?asked for}. A pinned
  subnet pins the zone.
change place availability zone: {zone?the one asked for} -> {zones?none named (no subnet either),
  then each of the others}
change act without a subnet EC2 chooses a zone that has capacity
futile a quota increase: the limit was not reached
issue danvk/mapsnap#432

== ec2_type_not_in_zone | root | certain
line instance type \((?P<type>[\w.]+)\) is not supported in your requested Availability Zone
  \((?P<zone>[a-z0-9-]+)\)(?:.{0,200}?choosing (?P<zones>[a-z0-9, -]+))?
line requested configuration is currently not supported
cause The zone {zone?asked for} never offers {type?this type}: it is no passing stockout.
change place availability zone: {zone?asked for} -> {zones?one that describe-instance-type-offerings
  lists}
futile trying the same zone later
issue commonwarexyz/monorepo#2859

== spot_price_too_low | root | certain
line SpotMaxPriceTooLow|Your Spot request price of (?P<price>[\d.]+) is lower than
line price-too-low
cause The spot price is above the maximum that the request allows.
change setting MaxPrice: {price?as it is} -> none (the on-demand price is the limit then)
futile other zones with the same maximum

== do_region | root | certain
line \b422\b.{0,60}(?:Region|Size) is not available
line (?:Size|Region) is not available in this region|size is (?:currently )?(?:not available
  |restricted)
line You specified an invalid size for (?:the )?Droplet creation
line no capacity .{0,40}(?:droplet|region)
cause DigitalOcean makes no new droplets of that size in that region now.
change place region: the one asked for -> one that GET /v2/sizes lists for this size
futile repeating the request in the same region
issue kelda/kelda#1359

== k8s_no_accelerator_node | root | certain
line nodes are available: .{0,120}?Insufficient (?P<resource>(?:google\.com/tpu|nvidia\.com/gpu
  |amd\.com/gpu|[\w./-]+))
line (?:didn't match|did not match) Pod's node affinity/selector
line pod didn't trigger scale-up
cause No node of the cluster has what the pod asks for ({resource?an accelerator or a label}).
change act a node pool with this accelerator and topology, or selectors that name an existing one
change setting resources.limits: {resource?the accelerator} -> exactly the chips of one node
futile deleting the pod: its successor waits as well

== machine_type_not_here | root | certain
line machine type (?:with name )?'?(?P<type>[\w-]+)'? (?:does not exist|is not available|not found)
  in zone '?(?P<zone>[a-z0-9-]+)
line Invalid value for field 'resource\.machineType'
line acceleratorTypes?/(?P<type>[\w-]+)'? was not found|accelerator type .{0,60}(?:not found|is not
  available in)
cause The zone {zone?asked for} does not offer {type?this machine type}: never, not only now.
change place zone: {zone?asked for} -> one that "gcloud compute machine-types list" shows for it
futile waiting for capacity
"""

QUOTA_SIGNATURES = r"""
== tpu_quota_held | root | certain
line Quota '?(?P<quota>TPU\w+)'? (?:exhausted|exceeded)
line Quota limit '?(?P<quota>TPU\w+)'? has been exceeded
near (?:queued-resources|STATE|state).{0,400}\b(?:SUSPENDED|FAILED)\b|\b(?:SUSPENDED|FAILED)\s*$
cause Dead queued resources (SUSPENDED or FAILED) still hold the quota {quota?}. They stay in the
  queue until somebody deletes them.
change act delete the dead queued resources (gcloud compute tpus queued-resources delete NAME
  --force), a decision for a person; list_orphans shows them
futile a quota increase: enough is granted, it is only held
issue marin-community/marin#87; marin-community/marin#4724

== gpu_quota_global | root | certain
line Quota '?GPUS_ALL_REGIONS'? exceeded\.?(?:\s*Limit: (?P<limit>[\d.]+))?
line GPUS_ALL_REGIONS.{0,20}(?:exceeded|violated)
cause The global GPU quota GPUS_ALL_REGIONS is {limit?used up} (0 in new projects), whatever the
  regional quota says.
change setting GPUS_ALL_REGIONS: {limit?0} -> 1 or more (a quota request; needs a paid account)
futile other zones or regions: this limit is for all of them
issue fastai/course-v3#165

== gce_regional_quota | root | certain
line Quota '?(?P<quota>[A-Z][\w-]+)'? (?:exceeded|exhausted)\.?\s*(?:Limit:? (?P<limit>[\d.]+)
  in region (?P<region>[a-z0-9-]+))?
line Quota limit '?(?P<quota>\w+)'? has been exceeded\.(?: Limit: (?P<limit>[\d.]+) in
  (?:zone|region) (?P<region>[a-z0-9-]+))?
line \bQUOTA_EXCEEDED\b|GCE quota exceeded
unless ZONE_RESOURCE_POOL_EXHAUSTED|GPUS_ALL_REGIONS
cause The quota {quota?} in {region?the region} is used up (limit {limit?reached}). It is a limit of
  the project, not a stockout.
change setting {quota?the quota}: {limit?its limit} -> more, requested for {region?the region}
change place region: {region?the one asked for} -> one in which there is quota left
futile other zones of the same region, waiting

== ec2_spot_count | root | certain
line MaxSpotInstanceCountExceeded|Max spot instance count exceeded
cause The spot quota of this instance family is used up (counted in vCPUs, for the whole region): it
  is a quota, though it looks like missing capacity.
change setting spot vCPU quota: as it is -> at least the type's vCPUs (Service Quotas, the family's
  own spot code)
change act on-demand, which has another quota
futile other Availability Zones: the limit is the region's

== ec2_vcpu_quota | root | certain
line more vCPU capacity than your current vCPU limit of (?P<limit>\d+) allows
line VcpuLimitExceeded|InstanceLimitExceeded
cause The vCPU quota of the type's family (such as "Running On-Demand G and VT instances") is
  {limit?used up}. It counts vCPUs, not instances.
change setting vCPU quota of the family: {limit?as it is} -> at least the type's vCPUs (a Service
  Quotas request; spot and on-demand are separate)
change place region: the one asked for -> one in which the quota is granted
futile other Availability Zones
issue skypilot-org/skypilot#975

== cloud_run_gpu_quota | root | certain
line Quota exceeded for total allowable count of GPUs
line do not have quota for using GPUs with(?:out)? zonal redundancy
line (?P<quota>Nvidia\w*Gpu\w*Per\w+) requested: (?P<asked>\d+) allowed: (?P<limit>\d+)
line Quota (?:violated|exceeded).{0,60}(?P<quota>Nvidia\w*Gpu\w*)(?:.{0,80}?requested:
  (?P<asked>\d+) allowed: (?P<limit>\d+))?
cause Cloud Run's GPU quota in this region does not allow it (asked {asked?more}, allowed
  {limit?fewer}). GPUs with and without zonal redundancy have separate quotas, and a rollout needs
  room for the old and the new revision together.
change setting GPU quota of the region: {limit?as it is} -> more (a request names the zonal
  redundancy)
change flag --max-instances: as it is -> a third of the quota, so that a rollout fits
change place region: the one asked for -> one with quota
futile redeploying unchanged
issue GoogleCloudPlatform/magic-modules#17149

== cloud_run_cpu_memory_quota | root | certain
line Quota (?:violated|exceeded).{0,80}?(?P<quota>(?:Cpu|Mem)\w*Alloc\w*)(?:.{0,80}?requested:
  (?P<asked>\d+) allowed: (?P<limit>\d+))?
line (?P<quota>(?:Cpu|Mem)Alloc\w*) requested: (?P<asked>\d+) allowed: (?P<limit>\d+)
line Max instances must be set to (?P<fits>\d+) or fewer
line set (?:the )?(?:max(?:imum)?[ -]instances?).{0,40}to (?P<fits>\d+)
cause Cloud Run multiplies CPU and memory by max-instances and compares that with the quota: asked
  {asked?more}, allowed {limit?less}. The message may even say that max instances must be 0: then
  one instance alone is more than the quota.
also (?P<quota>(?:Cpu|Mem)Alloc\w*) requested: (?P<asked>\d+)\s+allowed: (?P<limit>\d+)
change flag --max-instances: as it is -> 1
change flag --cpu and --memory: as they are -> what one instance may have within the quota
change place region: the one asked for -> one with more quota for CPU and memory
change setting CPU and memory quota of the region: {limit?as it is} -> more
futile setting max instances to 0: nothing would run
issue googlecodelabs/feedback#1856, #2311

== do_droplet_limit | root | certain
line (?:exceed|reached|over).{0,40}droplet limit|droplet limit.{0,40}(?:exceed|reached)
cause The account's droplet limit is reached.
change setting droplet limit: as it is -> more (a request to DigitalOcean)
change act see with list_orphans whether forgotten droplets use it up
futile other regions

== api_rate_limit | fault | certain
line RequestLimitExceeded|ThrottlingException|Rate exceeded
line RATE_LIMIT_EXCEEDED|Quota exceeded for quota metric .{0,80}(?:per minute|requests)
line \btoo_many_requests\b|rateLimitExceeded
cause Too many calls to the provider's API in a short time; nothing is wrong with the request.
change act wait for a minute, then poll less often
futile asking for machine quota

== k8s_quota | root | certain
line forbidden: exceeded quota: (?P<quota>[\w.-]+)
cause The namespace's ResourceQuota {quota?} does not allow what the pod asks for.
change setting ResourceQuota {quota?}: as it is -> enough for this pod
futile more nodes

== billing_disabled | root | certain
line BILLING_DISABLED|requires billing to be enabled|billing account.{0,60}(?:disabled|closed|not
  open)
line PendingVerification|OptInRequired
cause The provider refuses because of the account: billing is off, or the account is not verified.
change act a person opens billing for this project (or finishes the account's verification)
futile quota requests, other zones
"""
